data "aws_caller_identity" "this" {}
data "aws_partition" "this" {}

data "aws_s3_bucket" "results" {
  bucket = "${var.name}-${data.aws_caller_identity.this.account_id}-${var.region}"
}

data "aws_kms_alias" "this" {
  name = "alias/${var.name}"
}

data "aws_ecr_repository" "this" {
  name = var.name
}

locals {
  stack   = "${var.name}-eks" # both stacks may be up in one account
  key_arn = data.aws_kms_alias.this.target_key_arn
  policy  = "arn:${data.aws_partition.this.partition}:iam::aws:policy"
}

module "network" {
  source             = "../modules/network"
  name               = local.stack
  cidr               = var.cidr
  zone               = var.zone
  second_zone        = true
  nat                = var.nat
  key_arn            = local.key_arn
  log_retention_days = var.log_retention_days
  interface_endpoints = [
    "ec2", "ecr.api", "ecr.dkr", "eks", "eks-auth", "kms", "logs", "monitoring", "ssm", "ssmmessages", "ec2messages", "sts",
  ]
}

module "observability" {
  source             = "../modules/observability"
  name               = local.stack
  key_arn            = local.key_arn
  nodes              = { for name, group in var.workers : name => { group = module.nodes[name].group, gpus = group.gpus, instance_type = group.instance_type } }
  idle_minutes       = var.idle_minutes
  idle_actions       = { for name, policy in aws_autoscaling_policy.idle : name => [policy.arn] }
  stalled_minutes    = var.stalled_minutes
  alarm_email        = var.alarm_email
  budget_usd         = var.budget_usd
  log_retention_days = var.log_retention_days
  head_running = {
    namespace   = "ContainerInsights"
    metric_name = "service_number_of_running_pods"
    dimensions  = { ClusterName = local.stack, Namespace = "rayapp", Service = "rayapp-head-svc" }
    missing     = "breaching" # the metric goes with its pod
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

module "lustre" {
  source                  = "../modules/lustre"
  count                   = var.lustre_gib == 0 ? 0 : 1
  name                    = local.stack
  capacity_gib            = var.lustre_gib
  throughput_mb_s_per_tib = var.lustre_throughput_mb_s_per_tib
  prefixes                = ["data/", "models/"]
  bucket                  = data.aws_s3_bucket.results.bucket
  key_arn                 = local.key_arn
  vpc_id                  = module.network.vpc_id
  subnet_id               = module.network.subnet_id
  nodes_security_group_id = module.network.nodes_security_group_id
}

resource "aws_cloudwatch_log_group" "control_plane" {
  name              = "/aws/eks/${local.stack}/cluster"
  retention_in_days = var.log_retention_days
  kms_key_id        = local.key_arn
}

resource "aws_eks_cluster" "this" {
  #checkov:skip=CKV_AWS_39:public only for the addresses in api_cidrs, and by default for none
  #checkov:skip=CKV_AWS_38:public only for the addresses in api_cidrs, which must not be everyone
  name                          = local.stack
  version                       = var.kubernetes_version
  role_arn                      = aws_iam_role.cluster.arn
  bootstrap_self_managed_addons = false
  enabled_cluster_log_types     = ["api", "audit", "authenticator", "controllerManager", "scheduler"]

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }

  vpc_config {
    subnet_ids              = concat([module.network.subnet_id], module.network.second_subnet_ids)
    endpoint_private_access = true
    endpoint_public_access  = length(var.api_cidrs) > 0
    public_access_cidrs     = length(var.api_cidrs) > 0 ? var.api_cidrs : null
  }

  upgrade_policy {
    support_type = "STANDARD" # extended support costs 0.60 instead of 0.10 USD/h
  }

  encryption_config {
    resources = ["secrets"]
    provider {
      key_arn = local.key_arn
    }
  }

  depends_on = [aws_iam_role_policy_attachment.cluster, aws_cloudwatch_log_group.control_plane]
}

resource "aws_eks_access_entry" "admin" {
  for_each      = toset(var.admin_role_arns)
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.key
}

resource "aws_eks_access_policy_association" "admin" {
  for_each      = aws_eks_access_entry.admin
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.value.principal_arn
  policy_arn    = "arn:${data.aws_partition.this.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
  access_scope {
    type = "cluster"
  }
}

# VPC CNI before the nodes, or pods start without addresses and without network policies.
resource "aws_eks_addon" "network" {
  for_each = {
    vpc-cni                = jsonencode({ enableNetworkPolicy = "true" })
    kube-proxy             = null
    eks-pod-identity-agent = null
  }
  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  configuration_values        = each.value
  resolve_conflicts_on_update = "OVERWRITE"
}

resource "aws_eks_addon" "system" {
  for_each = toset(concat(
    ["coredns", "metrics-server", "amazon-cloudwatch-observability", "aws-ebs-csi-driver", "eks-node-monitoring-agent"],
    var.lustre_gib == 0 ? [] : ["aws-fsx-csi-driver"],
  ))
  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  resolve_conflicts_on_update = "OVERWRITE"
  depends_on                  = [module.system] # they need a node to run on
}

# Of workers alone: a group of several instance types lacks capacity, and a reservation has its own place.
resource "aws_placement_group" "this" {
  name     = local.stack
  strategy = "cluster"
}

# Each group of a list in order of preference has its own: only one of them has nodes.
resource "aws_placement_group" "preferred" {
  for_each = { for name, group in var.workers : name => group if group.preferred }
  name     = "${local.stack}-${each.key}"
  strategy = "cluster"
}

# Ray head, operator and add-ons: no GPU, always there.
module "system" {
  source             = "../modules/eks_nodes"
  name               = "${local.stack}-system"
  group              = "system"
  cluster            = aws_eks_cluster.this.name
  machine            = merge(var.head, { max_nodes = 3, market = "on-demand", reservation_id = null })
  min_nodes          = 1
  nodes              = 1
  placement_group    = null
  subnet_id          = module.network.subnet_id
  security_group_ids = [aws_eks_cluster.this.vpc_config[0].cluster_security_group_id, module.network.nodes_security_group_id]
  node_role_arn      = aws_iam_role.node.arn
  agent_parameter    = "/${local.stack}/cloudwatch-agent"
  depends_on         = [aws_eks_addon.network, aws_iam_role_policy_attachment.node]
}

module "nodes" {
  source             = "../modules/eks_nodes"
  for_each           = var.workers
  name               = "${local.stack}-${each.key}"
  group              = each.key
  cluster            = aws_eks_cluster.this.name
  machine            = each.value
  min_nodes          = 0
  nodes              = each.value.nodes
  scaled_elsewhere   = each.value.autoscaled || each.value.preferred
  placement_group    = !each.value.placed || each.value.reservation_id != null ? null : each.value.preferred ? aws_placement_group.preferred[each.key].name : aws_placement_group.this.name
  subnet_id          = module.network.subnet_id
  security_group_ids = [aws_eks_cluster.this.vpc_config[0].cluster_security_group_id, module.network.nodes_security_group_id]
  node_role_arn      = aws_iam_role.node.arn
  agent_parameter    = "/${local.stack}/cloudwatch-agent"
  depends_on         = [aws_eks_addon.network, aws_iam_role_policy_attachment.node]
}

# Idle GPUs go; EKS drains their nodes, and SIGTERM saves a run that is still there. Applying again brings them back;
# of a list, `rayapp capacity` does.
# Nodes that the cluster autoscaler adds follow the pods, which Ray's autoscaler takes away.
resource "aws_autoscaling_policy" "idle" {
  for_each               = { for name, group in var.workers : name => group if !group.autoscaled }
  name                   = "${local.stack}-${each.key}-idle"
  autoscaling_group_name = module.nodes[each.key].group
  policy_type            = "StepScaling"
  adjustment_type        = "ExactCapacity"
  step_adjustment {
    metric_interval_upper_bound = 0
    scaling_adjustment          = 0
  }
}

data "aws_iam_policy_document" "trust" {
  for_each = {
    cluster = { service = "eks.amazonaws.com", actions = ["sts:AssumeRole", "sts:TagSession"] }
    node    = { service = "ec2.amazonaws.com", actions = ["sts:AssumeRole"] }
    pod     = { service = "pods.eks.amazonaws.com", actions = ["sts:AssumeRole", "sts:TagSession"] }
  }
  statement {
    actions = each.value.actions
    principals {
      type        = "Service"
      identifiers = [each.value.service]
    }
  }
}

resource "aws_iam_role" "cluster" {
  name               = "${local.stack}-eks"
  assume_role_policy = data.aws_iam_policy_document.trust["cluster"].json
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "${local.policy}/AmazonEKSClusterPolicy"
}

resource "aws_iam_role" "node" {
  name               = "${local.stack}-node"
  assume_role_policy = data.aws_iam_policy_document.trust["node"].json
}

# AWS keeps these in step with its agents, which no list of ours would.
resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset([
    "AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryPullOnly", "AmazonSSMManagedInstanceCore",
  ])
  role       = aws_iam_role.node.name
  policy_arn = "${local.policy}/${each.key}"
}

resource "aws_iam_role_policy" "node" {
  name   = "agent"
  role   = aws_iam_role.node.id
  policy = module.observability.agent_policy
}

# What the code in the Ray pods may do: a run's own prefixes.
resource "aws_iam_role" "run" {
  name               = "${local.stack}-run"
  assume_role_policy = data.aws_iam_policy_document.trust["pod"].json
}

data "aws_iam_policy_document" "run" {
  source_policy_documents = [module.run_access.policy]
  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    resources = ["${module.observability.log_group.arn}:*"] # the streams of this one group
  }
}

resource "aws_iam_role_policy" "run" {
  name   = "run"
  role   = aws_iam_role.run.id
  policy = data.aws_iam_policy_document.run.json
}

# The add-ons' own controllers, each with AWS's policy for it and a role of its own.
locals {
  controllers = merge(
    {
      amazon-cloudwatch-observability = { namespace = "amazon-cloudwatch", account = "cloudwatch-agent", policy = "CloudWatchAgentServerPolicy" }
      aws-ebs-csi-driver              = { namespace = "kube-system", account = "ebs-csi-controller-sa", policy = "service-role/AmazonEBSCSIDriverPolicy" }
    },
    var.lustre_gib == 0 ? {} : {
      # The file system is made here, not by the driver, which thus only has to look.
      aws-fsx-csi-driver = { namespace = "kube-system", account = "fsx-csi-controller-sa", policy = "AmazonFSxReadOnlyAccess" }
    },
  )
}

resource "aws_iam_role" "controller" {
  for_each           = local.controllers
  name               = "${local.stack}-${each.key}"
  assume_role_policy = data.aws_iam_policy_document.trust["pod"].json
}

resource "aws_iam_role_policy_attachment" "controller" {
  for_each   = local.controllers
  role       = aws_iam_role.controller[each.key].name
  policy_arn = "${local.policy}/${each.value.policy}"
}

resource "aws_eks_pod_identity_association" "controller" {
  for_each        = local.controllers
  cluster_name    = aws_eks_cluster.this.name
  namespace       = each.value.namespace
  service_account = each.value.account
  role_arn        = aws_iam_role.controller[each.key].arn
}

resource "aws_eks_pod_identity_association" "run" {
  cluster_name    = aws_eks_cluster.this.name
  namespace       = "rayapp"
  service_account = "rayapp"
  role_arn        = aws_iam_role.run.arn
}
