data "aws_availability_zones" "this" {
  #checkov:skip=CKV_AWS_394:zones are only chosen from; a new zone is not used before one asks for it by `zone`
  state = "available"
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"] # no local zones
  }
}

data "aws_region" "this" {}

locals {
  zone = coalesce(var.zone, data.aws_availability_zones.this.names[0])
  # EKS wants its API server's interfaces in two zones; nodes are only ever in the first.
  second_zone = local.other_zones[0]
  other_zones = [for zone in data.aws_availability_zones.this.names : zone if zone != local.zone]
  more_zones  = slice(local.other_zones, 0, min(var.zones - 1, length(local.other_zones)))
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id # without rules: denies all
}

# EFA, placement groups and FSx for Lustre all stay within one zone, and traffic between zones is billed.
resource "aws_subnet" "private" {
  vpc_id            = aws_vpc.this.id
  availability_zone = local.zone
  cidr_block        = cidrsubnet(var.cidr, 2, 1)
  tags              = { Name = "${var.name}-private" }
}

# Where workers may be instead, all of one run together: a zone may lack an instance type for hours.
resource "aws_subnet" "more" {
  for_each          = toset(local.more_zones)
  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.cidr, 2, 2 + index(local.more_zones, each.key))
  tags              = { Name = "${var.name}-private-${each.key}" }
}

resource "aws_route_table_association" "more" {
  for_each       = aws_subnet.more
  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}

resource "aws_subnet" "second" {
  count             = var.second_zone ? 1 : 0
  vpc_id            = aws_vpc.this.id
  availability_zone = local.second_zone
  cidr_block        = cidrsubnet(var.cidr, 8, 1)
  tags              = { Name = "${var.name}-second" }
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route_table_association" "private" {
  subnet_id      = aws_subnet.private.id
  route_table_id = aws_route_table.private.id
}

resource "aws_route_table_association" "second" {
  count          = var.second_zone ? 1 : 0
  subnet_id      = aws_subnet.second[0].id
  route_table_id = aws_route_table.private.id
}

# The way out, if asked for. Nothing comes in: the public subnet holds only the NAT gateway.
resource "aws_subnet" "public" {
  count                   = var.nat ? 1 : 0
  vpc_id                  = aws_vpc.this.id
  availability_zone       = local.zone
  cidr_block              = cidrsubnet(var.cidr, 8, 0)
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-nat" }
}

resource "aws_internet_gateway" "this" {
  count  = var.nat ? 1 : 0
  vpc_id = aws_vpc.this.id
}

resource "aws_eip" "nat" {
  count      = var.nat ? 1 : 0
  domain     = "vpc"
  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  count         = var.nat ? 1 : 0
  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.public[0].id
}

resource "aws_route_table" "public" {
  count  = var.nat ? 1 : 0
  vpc_id = aws_vpc.this.id
}

resource "aws_route" "out" {
  count                  = var.nat ? 1 : 0
  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  count          = var.nat ? 1 : 0
  subnet_id      = aws_subnet.public[0].id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_route" "nat" {
  count                  = var.nat ? 1 : 0
  route_table_id         = aws_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

# Checkpoints and data go to S3 free of charge and past the NAT gateway.
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.this.name}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private.id]
  tags              = { Name = "${var.name}-s3" }
}

resource "aws_vpc_endpoint" "interface" {
  for_each            = toset(var.interface_endpoints)
  vpc_id              = aws_vpc.this.id
  service_name        = "com.amazonaws.${data.aws_region.this.name}.${each.key}"
  vpc_endpoint_type   = "Interface"
  subnet_ids          = [aws_subnet.private.id]
  security_group_ids  = [aws_security_group.endpoints.id]
  private_dns_enabled = true
  tags                = { Name = "${var.name}-${each.key}" }
}

resource "aws_security_group" "endpoints" {
  name_prefix = "${var.name}-endpoints-"
  description = "Interface endpoints: HTTPS from the nodes"
  vpc_id      = aws_vpc.this.id
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  security_group_id            = aws_security_group.endpoints.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  description                  = "HTTPS from the nodes"
}

resource "aws_security_group" "nodes" {
  #checkov:skip=CKV2_AWS_5:hosts and tasks get it through this module's output
  name_prefix = "${var.name}-nodes-"
  description = "Ray nodes: Ray, NCCL and EFA among themselves, nothing from elsewhere"
  vpc_id      = aws_vpc.this.id
  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
  description                  = "Everything among the nodes; EFA needs all protocols"
}

resource "aws_vpc_security_group_egress_rule" "nodes" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
  description                  = "EFA does not count a rule for 0.0.0.0/0 as one for the group"
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "HTTPS: S3 through its endpoint, all else through the NAT gateway if there is one"
}

resource "aws_flow_log" "this" {
  vpc_id          = aws_vpc.this.id
  traffic_type    = "REJECT"
  iam_role_arn    = aws_iam_role.flow_log.arn
  log_destination = aws_cloudwatch_log_group.flow_log.arn
}

resource "aws_cloudwatch_log_group" "flow_log" {
  name              = "/${var.name}/flow-log"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.key_arn
}

data "aws_iam_policy_document" "flow_log_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["vpc-flow-logs.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "flow_log" {
  name               = "${var.name}-flow-log"
  assume_role_policy = data.aws_iam_policy_document.flow_log_trust.json
}

data "aws_iam_policy_document" "flow_log" {
  statement {
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = ["${aws_cloudwatch_log_group.flow_log.arn}:*"] # the streams of this one group
  }
}

resource "aws_iam_role_policy" "flow_log" {
  role   = aws_iam_role.flow_log.id
  policy = data.aws_iam_policy_document.flow_log.json
}
