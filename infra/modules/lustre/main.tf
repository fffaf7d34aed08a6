# A Lustre file system in the nodes' zone whose folders are prefixes of the bucket.
resource "aws_security_group" "this" {
  name_prefix = "${var.name}-lustre-"
  description = "FSx for Lustre: from the nodes and among its servers"
  vpc_id      = var.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "this" {
  for_each = {
    for pair in setproduct(["nodes", "servers"], [[988, 988], [1018, 1023]]) : "${pair[0]}-${pair[1][0]}" => pair
  }
  security_group_id            = aws_security_group.this.id
  referenced_security_group_id = each.value[0] == "nodes" ? var.nodes_security_group_id : aws_security_group.this.id
  ip_protocol                  = "tcp"
  from_port                    = each.value[1][0]
  to_port                      = each.value[1][1]
  description                  = "Lustre from the ${each.value[0]}"
}

resource "aws_vpc_security_group_egress_rule" "this" {
  security_group_id            = aws_security_group.this.id
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "tcp"
  from_port                    = 988
  to_port                      = 1023
  description                  = "Lustre among its servers"
}

resource "aws_vpc_security_group_egress_rule" "nodes" {
  security_group_id            = var.nodes_security_group_id
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "tcp"
  from_port                    = 988
  to_port                      = 1023
  description                  = "Lustre"
}

resource "aws_fsx_lustre_file_system" "this" {
  storage_capacity            = var.capacity_gib
  subnet_ids                  = [var.subnet_id]
  security_group_ids          = [aws_security_group.this.id]
  deployment_type             = "PERSISTENT_2"
  storage_type                = "SSD"
  per_unit_storage_throughput = var.throughput_mb_s_per_tib
  data_compression_type       = "LZ4"
  file_system_type_version    = "2.15"
  kms_key_id                  = var.key_arn
  metadata_configuration {
    mode = "AUTOMATIC"
  }
  tags = { Name = var.name }
}

resource "aws_fsx_data_repository_association" "this" {
  for_each             = toset(var.prefixes)
  file_system_id       = aws_fsx_lustre_file_system.this.id
  file_system_path     = "/${trimsuffix(each.key, "/")}"
  data_repository_path = "s3://${var.bucket}/${trimsuffix(each.key, "/")}"
  s3 {
    # Read through from the bucket only: results go to S3 by the run itself, once.
    auto_import_policy {
      events = ["NEW", "CHANGED", "DELETED"]
    }
  }
}
