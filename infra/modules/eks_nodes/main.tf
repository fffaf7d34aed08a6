# A managed node group of one instance type: tainted if it has GPUs, one zone, one placement group.
resource "aws_launch_template" "this" {
  name_prefix            = "${var.name}-"
  update_default_version = true
  # A capacity block's type stands in the template; otherwise the node group says it.
  instance_type = var.machine.market == "capacity-block" ? var.machine.instance_type : null
  user_data = base64encode(templatefile("${path.module}/user_data.mime", {
    gpus            = var.machine.gpus
    agent_parameter = var.agent_parameter
  }))

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1 # pods have their service account's role, not the node's
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = var.machine.disk_gib
      volume_type           = "gp3"
      throughput            = var.machine.gpus > 0 ? 1000 : null # MB/s: an image of 20 GB, Ray's spilled objects
      iops                  = var.machine.gpus > 0 ? 6000 : null
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "placement" {
    for_each = var.placement_group == null ? [] : [var.placement_group]
    content {
      group_name = placement.value
    }
  }

  # As the instance type has them: card 0 carries IP traffic, beside EFA where it can; the others only EFA.
  dynamic "network_interfaces" {
    for_each = var.machine.interfaces
    content {
      device_index          = network_interfaces.key == 0 ? 0 : 1
      network_card_index    = network_interfaces.key
      interface_type        = network_interfaces.value
      security_groups       = var.security_group_ids
      delete_on_termination = true
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = var.machine.reservation_id == null ? [] : [var.machine.reservation_id]
    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "instance_market_options" {
    for_each = var.machine.market == "capacity-block" ? ["capacity-block"] : []
    content {
      market_type = instance_market_options.value
    }
  }

  tag_specifications {
    resource_type = "instance"
    tags          = { Name = var.name, Project = var.cluster }
  }
}

# Applying sets the number of nodes: the idle alarm sets it to 0.
resource "aws_eks_node_group" "this" {
  count           = var.scaled_elsewhere ? 0 : 1
  cluster_name    = var.cluster
  node_group_name = var.name
  node_role_arn   = var.node_role_arn
  subnet_ids      = [var.subnet_id]
  ami_type        = var.machine.gpus > 0 ? "AL2023_x86_64_NVIDIA" : "AL2023_x86_64_STANDARD"
  capacity_type   = { on-demand = "ON_DEMAND", spot = "SPOT", capacity-block = "CAPACITY_BLOCK" }[var.machine.market]
  instance_types  = var.machine.market == "capacity-block" ? null : [var.machine.instance_type]
  labels          = { "rayapp/group" = var.group }

  launch_template {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }

  scaling_config {
    min_size     = var.min_nodes
    desired_size = var.nodes
    max_size     = var.machine.max_nodes
  }

  update_config {
    max_unavailable = 1
  }

  # A node whose GPU or EFA fails is replaced by EKS.
  node_repair_config {
    enabled = true
  }

  dynamic "taint" {
    for_each = var.machine.gpus > 0 ? ["nvidia.com/gpu"] : []
    content {
      key    = taint.value
      value  = "true"
      effect = "NO_SCHEDULE"
    }
  }
}

# The same, but the cluster autoscaler or `rayapp capacity` sets the number of nodes; which attributes are ignored cannot depend on a variable.
resource "aws_eks_node_group" "autoscaled" {
  count           = var.scaled_elsewhere ? 1 : 0
  cluster_name    = var.cluster
  node_group_name = var.name
  node_role_arn   = var.node_role_arn
  subnet_ids      = [var.subnet_id]
  ami_type        = var.machine.gpus > 0 ? "AL2023_x86_64_NVIDIA" : "AL2023_x86_64_STANDARD"
  capacity_type   = { on-demand = "ON_DEMAND", spot = "SPOT", capacity-block = "CAPACITY_BLOCK" }[var.machine.market]
  instance_types  = var.machine.market == "capacity-block" ? null : [var.machine.instance_type]
  labels          = { "rayapp/group" = var.group }

  launch_template {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }

  scaling_config {
    min_size     = var.min_nodes
    desired_size = var.nodes
    max_size     = var.machine.max_nodes
  }

  update_config {
    max_unavailable = 1
  }

  # A node whose GPU or EFA fails is replaced by EKS.
  node_repair_config {
    enabled = true
  }

  dynamic "taint" {
    for_each = var.machine.gpus > 0 ? ["nvidia.com/gpu"] : []
    content {
      key    = taint.value
      value  = "true"
      effect = "NO_SCHEDULE"
    }
  }

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size] # theirs
  }
}
