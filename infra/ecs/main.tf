data "aws_caller_identity" "this" {}
data "aws_partition" "this" {}

data "aws_s3_bucket" "results" {
  bucket = "${var.name}-${data.aws_caller_identity.this.account_id}-${var.region}"
}

data "aws_kms_alias" "this" {
  name = "alias/${var.name}"
}

data "aws_ssm_parameter" "image" {
  for_each = toset(["gpu", "cpu"])
  name     = "/aws/service/ecs/optimized-ami/amazon-linux-2023/${each.key == "gpu" ? "gpu/" : ""}recommended/image_id"
}

locals {
  stack   = "${var.name}-ecs" # both stacks may be up in one account
  key_arn = data.aws_kms_alias.this.target_key_arn
  policy  = "arn:${data.aws_partition.this.partition}:iam::aws:policy"
  # What `rayapp render ecs` wrote; sizes are in there and in the tfvars beside it, nowhere else.
  task = { for role in toset(concat(["head"], values(var.workers)[*].task)) : role => jsondecode(file("${var.rendered}/${role}.json")) }
  roles = {
    execution = "arn:${data.aws_partition.this.partition}:iam::${data.aws_caller_identity.this.account_id}:role/${local.stack}-execution"
    task      = "arn:${data.aws_partition.this.partition}:iam::${data.aws_caller_identity.this.account_id}:role/${local.stack}-task"
  }
  # Of a list in order of preference there is a group in each zone; `rayapp capacity` starts one of them.
  preferred = { for name, group in var.workers : name => group if group.preferred }
  workers = merge(concat(
    [{ for name, group in var.workers : name => merge(group, { subnet_id = module.network.subnet_id }) if !group.preferred }],
    [for zone, subnet in module.network.subnet_ids : { for name, group in local.preferred : "${name}-${zone}" => merge(group, { subnet_id = subnet }) }],
  )...)
  groups = merge(
    { head = merge(var.head, { max_nodes = 1, market = "on-demand", reservation_id = null, subnet_id = module.network.subnet_id, preferred = false, placed = false }) },
    { for name, group in local.workers : "worker-${name}" => group },
  )
  services = merge(
    { for name, service in aws_ecs_service.worker : name => service.name },
    { for name, service in aws_ecs_service.preferred : name => service.name },
  )
}

module "network" {
  source             = "../modules/network"
  name               = local.stack
  cidr               = var.cidr
  zone               = var.zone
  zones              = length(local.preferred) > 0 ? var.zones : 1
  nat                = var.nat
  key_arn            = local.key_arn
  log_retention_days = var.log_retention_days
  interface_endpoints = [
    "ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "kms", "logs", "monitoring", "ssm", "ssmmessages", "ec2messages",
  ]
}

module "observability" {
  source             = "../modules/observability"
  name               = local.stack
  key_arn            = local.key_arn
  nodes              = { for name, group in local.groups : name => { group = "${local.stack}-${name}", gpus = group.gpus, instance_type = group.instance_type } }
  idle_minutes       = var.idle_minutes
  idle_actions       = { for name, policy in aws_appautoscaling_policy.idle : "worker-${name}" => [policy.arn] }
  stalled_minutes    = var.stalled_minutes
  alarm_email        = var.alarm_email
  budget_usd         = var.budget_usd
  log_retention_days = var.log_retention_days
  head_running = {
    namespace   = "ECS/ContainerInsights"
    metric_name = "RunningTaskCount"
    dimensions  = { ClusterName = local.stack, ServiceName = "head" }
    missing     = "notBreaching" # ECS tells 0 of a service that has no task
  }
}

module "run_access" {
  source            = "../modules/run_access"
  bucket_arn        = data.aws_s3_bucket.results.arn
  key_arn           = local.key_arn
  write_prefixes    = ["runs/"]
  read_prefixes     = ["data/", "models/"]
  secret_arns       = var.secret_arns
  secret_key_arns   = var.secret_key_arns
  metrics_namespace = local.stack
}

# Of workers alone: a group of several instance types lacks capacity, and a reservation has its own place.
resource "aws_placement_group" "this" {
  name     = local.stack
  strategy = "cluster"
}

resource "aws_placement_group" "preferred" {
  for_each = { for name, group in local.groups : name => group.preferred if group.preferred }
  name     = "${local.stack}-${each.key}"
  strategy = "cluster"
}

module "nodes" {
  source               = "../modules/ecs_nodes"
  for_each             = local.groups
  name                 = "${local.stack}-${each.key}"
  cluster              = local.stack
  machine              = each.value
  image_id             = coalesce(var.image_id, data.aws_ssm_parameter.image[each.value.gpus > 0 ? "gpu" : "cpu"].insecure_value)
  placement_group      = !each.value.placed || each.value.reservation_id != null ? null : each.value.preferred ? aws_placement_group.preferred[each.key].name : aws_placement_group.this.name
  subnet_id            = each.value.subnet_id
  security_group_id    = module.network.nodes_security_group_id
  instance_profile_arn = aws_iam_instance_profile.host.arn
  agent_parameter      = module.observability.agent_parameter
}

resource "aws_ecs_cluster" "this" {
  name = local.stack
  setting {
    name  = "containerInsights"
    value = "enabled"
  }
  configuration {
    execute_command_configuration {
      kms_key_id = local.key_arn
      logging    = "OVERRIDE"
      log_configuration {
        cloud_watch_log_group_name     = aws_cloudwatch_log_group.exec.name
        cloud_watch_encryption_enabled = true
      }
    }
  }
}

resource "aws_cloudwatch_log_group" "exec" {
  name              = "/${local.stack}/exec"
  retention_in_days = var.log_retention_days
  kms_key_id        = local.key_arn
}

resource "aws_ecs_cluster_capacity_providers" "this" {
  cluster_name       = aws_ecs_cluster.this.name
  capacity_providers = [for group in module.nodes : group.capacity_provider]
}

# Workers find the head as head.<name>.internal; they reach it, and one another, by address: no proxy between.
resource "aws_service_discovery_private_dns_namespace" "this" {
  name        = "${local.stack}.internal"
  description = "Where workers find the Ray head"
  vpc         = module.network.vpc_id
}

resource "aws_service_discovery_service" "head" {
  name          = "head"
  force_destroy = true
  dns_config {
    namespace_id   = aws_service_discovery_private_dns_namespace.this.id
    routing_policy = "MULTIVALUE"
    dns_records {
      type = "A"
      ttl  = 10 # a head that moves is found again within seconds
    }
  }
}

# Every Ray process and every client shows this token. It is made here and handed over write-only: it is in no
# state, plan or log. Raise token_version for a new one.
ephemeral "aws_secretsmanager_random_password" "token" {
  password_length     = 64
  exclude_punctuation = true
}

resource "aws_ssm_parameter" "token" {
  name             = "/${local.stack}/ray-token"
  description      = "Ray's authentication token: whoever has it can run code on the cluster"
  type             = "SecureString"
  key_id           = local.key_arn
  value_wo         = ephemeral.aws_secretsmanager_random_password.token.random_password
  value_wo_version = var.token_version
}

resource "aws_ecs_task_definition" "this" {
  #checkov:skip=CKV_AWS_336:Ray writes its sessions, sockets and spilled objects below /tmp of the container
  for_each                 = local.task
  family                   = each.value.family
  requires_compatibilities = each.value.requiresCompatibilities
  network_mode             = each.value.networkMode
  execution_role_arn       = aws_iam_role.execution.arn
  task_role_arn            = aws_iam_role.task.arn
  cpu                      = each.value.cpu
  memory                   = each.value.memory
  container_definitions    = jsonencode(each.value.containerDefinitions)

  dynamic "volume" {
    for_each = each.value.volumes
    content {
      name = volume.value.name
    }
  }

  lifecycle {
    precondition {
      condition     = each.value.taskRoleArn == local.roles.task && each.value.executionRoleArn == local.roles.execution
      error_message = "${var.rendered}/${each.key}.json was rendered for another account or name. Run `rayapp render ecs` again with --account and --name of this one."
    }
  }
}

resource "aws_ecs_service" "head" {
  name                               = "head"
  cluster                            = aws_ecs_cluster.this.id
  task_definition                    = aws_ecs_task_definition.this["head"].arn
  desired_count                      = var.head_count
  enable_execute_command             = true # the way in, see `rayapp connect ecs`
  force_delete                       = true
  deployment_minimum_healthy_percent = 0 # two heads would be two clusters
  deployment_maximum_percent         = 100
  availability_zone_rebalancing      = "DISABLED"
  capacity_provider_strategy {
    capacity_provider = module.nodes["head"].capacity_provider
    weight            = 1
  }
  network_configuration {
    subnets         = [module.network.subnet_id]
    security_groups = [module.network.nodes_security_group_id]
  }
  service_registries {
    registry_arn = aws_service_discovery_service.head.arn
  }
  depends_on = [aws_ecs_cluster_capacity_providers.this, aws_iam_role_policy.task, aws_iam_role_policy.execution]
}

resource "aws_ecs_service" "worker" {
  for_each                           = { for name, group in local.workers : name => group if !group.preferred }
  name                               = "worker-${each.key}"
  cluster                            = aws_ecs_cluster.this.id
  task_definition                    = aws_ecs_task_definition.this[each.value.task].arn
  desired_count                      = each.value.nodes
  enable_execute_command             = true
  force_delete                       = true
  deployment_minimum_healthy_percent = 0 # there is no room for a second worker on a host
  deployment_maximum_percent         = 100
  availability_zone_rebalancing      = "DISABLED"
  capacity_provider_strategy {
    capacity_provider = module.nodes["worker-${each.key}"].capacity_provider
    weight            = 1
  }
  network_configuration {
    subnets         = [module.network.subnet_id]
    security_groups = [module.network.nodes_security_group_id]
  }
  placement_constraints {
    type = "distinctInstance"
  }
  # The idle alarm sets desired_count to 0; applying again brings the workers back.
  depends_on = [aws_ecs_service.head]
}

# The same, but `rayapp capacity` sets the number of tasks; which attributes are ignored cannot depend on a variable.
resource "aws_ecs_service" "preferred" {
  for_each                           = { for name, group in local.workers : name => group if group.preferred }
  name                               = "worker-${each.key}"
  cluster                            = aws_ecs_cluster.this.id
  task_definition                    = aws_ecs_task_definition.this[each.value.task].arn
  desired_count                      = 0
  enable_execute_command             = true
  force_delete                       = true
  deployment_minimum_healthy_percent = 0
  deployment_maximum_percent         = 100
  availability_zone_rebalancing      = "DISABLED"
  capacity_provider_strategy {
    capacity_provider = module.nodes["worker-${each.key}"].capacity_provider
    weight            = 1
  }
  network_configuration {
    subnets         = [each.value.subnet_id]
    security_groups = [module.network.nodes_security_group_id]
  }
  placement_constraints {
    type = "distinctInstance"
  }
  depends_on = [aws_ecs_service.head]
  lifecycle {
    ignore_changes = [desired_count]
  }
}

# Idle GPUs scale their service, and by it their hosts, to none. SIGTERM saves a run that is still there.
resource "aws_appautoscaling_target" "worker" {
  for_each           = local.workers
  service_namespace  = "ecs"
  scalable_dimension = "ecs:service:DesiredCount"
  resource_id        = "service/${aws_ecs_cluster.this.name}/${local.services[each.key]}"
  min_capacity       = 0
  max_capacity       = each.value.max_nodes
}

resource "aws_appautoscaling_policy" "idle" {
  for_each           = local.workers
  name               = "${local.stack}-${each.key}-idle"
  policy_type        = "StepScaling"
  service_namespace  = aws_appautoscaling_target.worker[each.key].service_namespace
  scalable_dimension = aws_appautoscaling_target.worker[each.key].scalable_dimension
  resource_id        = aws_appautoscaling_target.worker[each.key].resource_id
  step_scaling_policy_configuration {
    adjustment_type         = "ExactCapacity"
    metric_aggregation_type = "Maximum"
    cooldown                = 300
    step_adjustment {
      metric_interval_upper_bound = 0
      scaling_adjustment          = 0
    }
  }
}

data "aws_iam_policy_document" "host_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "host" {
  name               = "${local.stack}-host"
  assume_role_policy = data.aws_iam_policy_document.host_trust.json
}

# AWS keeps these two in step with its agents, which no list of ours would.
resource "aws_iam_role_policy_attachment" "host" {
  for_each   = toset(["service-role/AmazonEC2ContainerServiceforEC2Role", "AmazonSSMManagedInstanceCore"])
  role       = aws_iam_role.host.name
  policy_arn = "${local.policy}/${each.key}"
}

resource "aws_iam_role_policy" "host" {
  name   = "agent"
  role   = aws_iam_role.host.id
  policy = module.observability.agent_policy
}

resource "aws_iam_instance_profile" "host" {
  name = "${local.stack}-host"
  role = aws_iam_role.host.name
}

data "aws_iam_policy_document" "task_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ecs-tasks.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.this.account_id]
    }
  }
}

# What ECS does to start a task: pull the image, read the token, open the log.
resource "aws_iam_role" "execution" {
  name               = "${local.stack}-execution"
  assume_role_policy = data.aws_iam_policy_document.task_trust.json
}

data "aws_ecr_repository" "this" {
  name = var.name
}

data "aws_iam_policy_document" "execution" {
  #checkov:skip=CKV_AWS_356:ecr:GetAuthorizationToken has no resources
  statement {
    sid       = "Pull"
    actions   = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability"]
    resources = [data.aws_ecr_repository.this.arn]
  }
  statement {
    sid       = "Registry"
    actions   = ["ecr:GetAuthorizationToken"]
    resources = ["*"] # the action has no resources
  }
  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${module.observability.log_group.arn}:*"] # the streams of this one group
  }
  statement {
    sid       = "Token"
    actions   = ["ssm:GetParameters"]
    resources = [aws_ssm_parameter.token.arn]
  }
  statement {
    sid       = "Key"
    actions   = ["kms:Decrypt"]
    resources = [local.key_arn]
  }
}

resource "aws_iam_role_policy" "execution" {
  name   = "execution"
  role   = aws_iam_role.execution.id
  policy = data.aws_iam_policy_document.execution.json
}

# What the code in the containers may do: a run's own prefixes, and the way in by ECS Exec.
resource "aws_iam_role" "task" {
  name               = "${local.stack}-task"
  assume_role_policy = data.aws_iam_policy_document.task_trust.json
}

data "aws_iam_policy_document" "task" {
  #checkov:skip=CKV_AWS_356:the actions of ECS Exec have no resources
  #checkov:skip=CKV_AWS_111:the actions of ECS Exec have no resources
  source_policy_documents = [module.run_access.policy]
  statement {
    sid       = "Exec"
    actions   = ["ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel", "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel"]
    resources = ["*"] # the actions have no resources
  }
  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    resources = ["${module.observability.log_group.arn}:*", "${aws_cloudwatch_log_group.exec.arn}:*"] # the streams of these two groups
  }
  statement {
    sid       = "Groups"
    actions   = ["logs:DescribeLogGroups"]
    resources = ["*"] # ECS Exec looks for its group by listing them; the action has no resources
  }
}

resource "aws_iam_role_policy" "task" {
  name   = "task"
  role   = aws_iam_role.task.id
  policy = data.aws_iam_policy_document.task.json
}
