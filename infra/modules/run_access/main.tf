# What a run may do, on ECS (task role) and EKS (pod identity) alike: read data and models, read and write
# its own prefix, publish metrics of its own namespace, read the secrets that it is told of. Nothing else.
locals {
  secrets = {
    Secrets    = { action = "secretsmanager:GetSecretValue", arns = [for arn in var.secret_arns : arn if strcontains(arn, ":secretsmanager:")] }
    Parameters = { action = "ssm:GetParameter", arns = [for arn in var.secret_arns : arn if strcontains(arn, ":ssm:")] }
    SecretKeys = { action = "kms:Decrypt", arns = var.secret_key_arns }
  }
}

data "aws_iam_policy_document" "this" {
  #checkov:skip=CKV_AWS_356:PutMetricData has no resources; its namespace is fixed by a condition
  #checkov:skip=CKV_AWS_111:PutMetricData has no resources; its namespace is fixed by a condition
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [var.bucket_arn]
    condition {
      # IfExists: HeadBucket, and the 404 of an absent key, need ListBucket in requests without a prefix. Its price is
      # that names at the bucket's root can be listed.
      test     = "StringLikeIfExists"
      variable = "s3:prefix"
      values   = concat([for prefix in concat(var.write_prefixes, var.read_prefixes) : "${prefix}*"], var.write_prefixes, var.read_prefixes)
    }
  }
  statement {
    sid       = "Uploads"
    actions   = ["s3:GetBucketLocation", "s3:ListBucketMultipartUploads"]
    resources = [var.bucket_arn]
  }
  statement {
    sid       = "Write"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    resources = [for prefix in var.write_prefixes : "${var.bucket_arn}/${prefix}*"] # the objects below a prefix
  }
  statement {
    sid       = "Read"
    actions   = ["s3:GetObject"]
    resources = [for prefix in var.read_prefixes : "${var.bucket_arn}/${prefix}*"] # the objects below a prefix
  }
  statement {
    sid       = "Key"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [var.key_arn]
  }
  dynamic "statement" {
    for_each = { for sid, each in local.secrets : sid => each if length(each.arns) > 0 }
    content {
      sid       = statement.key
      actions   = [statement.value.action]
      resources = statement.value.arns
    }
  }
  statement {
    sid       = "Metrics"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"] # the action has no resources; the condition names the namespace
    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = [var.metrics_namespace]
    }
  }
}
