# A group of EC2 hosts of one kind that an ECS cluster scales: launch template, Auto Scaling group, capacity provider.
resource "aws_launch_template" "this" {
  name_prefix            = "${var.name}-"
  image_id               = var.image_id
  instance_type          = var.machine.instance_type
  update_default_version = true
  user_data = base64encode(templatefile("${path.module}/user_data.sh", {
    cluster         = var.cluster
    gpus            = var.machine.gpus
    efa             = anytrue([for kind in var.machine.interfaces : startswith(kind, "efa")])
    agent_parameter = var.agent_parameter
  }))

  iam_instance_profile {
    arn = var.instance_profile_arn
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1 # containers have their task's role, not the host's
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

  # As the instance type has them: card 0 carries IP traffic, beside EFA where it can; the others only EFA,
  # which spares an address each.
  dynamic "network_interfaces" {
    for_each = var.machine.interfaces
    content {
      device_index                = network_interfaces.key == 0 ? 0 : 1
      network_card_index          = network_interfaces.key
      interface_type              = network_interfaces.value
      associate_public_ip_address = network_interfaces.key == 0 ? false : null
      security_groups             = [var.security_group_id]
      delete_on_termination       = true
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
    for_each = var.machine.market == "on-demand" ? [] : [var.machine.market]
    content {
      market_type = instance_market_options.value
    }
  }

  tag_specifications {
    resource_type = "instance"
    tags          = { Name = var.name }
  }
}

resource "aws_autoscaling_group" "this" {
  #checkov:skip=CKV_AWS_153:tags are set below, one by one, as the resource wants them
  name                      = var.name
  min_size                  = 0
  max_size                  = var.machine.max_nodes
  vpc_zone_identifier       = [var.subnet_id]
  placement_group           = var.placement_group
  protect_from_scale_in     = true # ECS decides which host goes: one without tasks
  health_check_type         = "EC2"
  health_check_grace_period = 300
  force_delete              = true # with the stack go its hosts, protected or not

  launch_template {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }

  dynamic "tag" {
    for_each = { AmazonECSManaged = "true", Name = var.name, Project = var.cluster }
    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    ignore_changes = [desired_capacity] # ECS's managed scaling sets it
  }
}

resource "aws_ecs_capacity_provider" "this" {
  name = var.name
  auto_scaling_group_provider {
    auto_scaling_group_arn         = aws_autoscaling_group.this.arn
    managed_termination_protection = "ENABLED"
    managed_draining               = "ENABLED"
    managed_scaling {
      status                    = "ENABLED"
      target_capacity           = 100 # no spare hosts, and none at all without tasks
      minimum_scaling_step_size = 1
      maximum_scaling_step_size = max(1, var.machine.max_nodes)
      instance_warmup_period    = 120
    }
  }
}
