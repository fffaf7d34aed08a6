data "aws_caller_identity" "this" {}
data "aws_partition" "this" {}
data "aws_region" "this" {}

locals {
  account = data.aws_caller_identity.this.account_id
  root    = "arn:${data.aws_partition.this.partition}:iam::${local.account}:root"
}

data "aws_iam_policy_document" "key" {
  #checkov:skip=CKV_AWS_109:a key policy is about its own key; "*" means this key, and the account's IAM decides
  #checkov:skip=CKV_AWS_111:a key policy is about its own key
  #checkov:skip=CKV_AWS_356:a key policy is about its own key
  statement {
    sid       = "Account"
    actions   = ["kms:*"] # without it nobody could ever change the key's policy again
    resources = ["*"]     # a key policy's resource is its own key
    principals {
      type        = "AWS"
      identifiers = [local.root]
    }
  }
  statement {
    sid       = "Logs"
    actions   = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncryptFrom", "kms:ReEncryptTo", "kms:GenerateDataKey", "kms:DescribeKey"]
    resources = ["*"] # a key policy's resource is its own key
    principals {
      type        = "Service"
      identifiers = ["logs.${data.aws_region.this.name}.amazonaws.com"]
    }
    condition {
      test     = "ArnLike"
      variable = "kms:EncryptionContext:aws:logs:arn"
      values   = ["arn:${data.aws_partition.this.partition}:logs:${data.aws_region.this.name}:${local.account}:log-group:*"]
    }
  }
  statement {
    sid       = "Alarms"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = ["*"] # a key policy's resource is its own key
    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

resource "aws_kms_key" "this" {
  description             = "${var.name}: results, images, logs and the Ray token"
  enable_key_rotation     = true
  deletion_window_in_days = 30 # without the key the results are lost
  policy                  = data.aws_iam_policy_document.key.json
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this.key_id
}

resource "aws_s3_bucket" "results" {
  #checkov:skip=CKV_AWS_144:checkpoints are large and short-lived; a copy in another region costs more than the run it saves
  #checkov:skip=CKV_AWS_18:access logs of S3 are CloudTrail data events, an account's choice, and checkpoint traffic makes them dear
  #checkov:skip=CKV2_AWS_62:nothing waits for events of this bucket
  bucket        = "${var.name}-${local.account}-${data.aws_region.this.name}"
  force_destroy = var.destroy_results_of == "${var.name}-${local.account}-${data.aws_region.this.name}"
}

resource "aws_s3_bucket_versioning" "results" {
  bucket = aws_s3_bucket.results.id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "results" {
  bucket = aws_s3_bucket.results.id
  rule {
    bucket_key_enabled = true # one KMS request per bucket and hour instead of one per object
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this.arn
    }
  }
}

resource "aws_s3_bucket_public_access_block" "results" {
  bucket                  = aws_s3_bucket.results.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "results" {
  bucket = aws_s3_bucket.results.id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

data "aws_iam_policy_document" "results" {
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]                                                      # a denial
    resources = [aws_s3_bucket.results.arn, "${aws_s3_bucket.results.arn}/*"] # a denial
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "results" {
  bucket     = aws_s3_bucket.results.id
  policy     = data.aws_iam_policy_document.results.json
  depends_on = [aws_s3_bucket_public_access_block.results]
}

# What a run keeps is current, and nothing here expires a current object: neither the newest checkpoint nor
# model/. Old checkpoints are deleted by the run itself (checkpoint.keep); their versions, which are paid for like
# current objects, go the next day. S3 counts in whole days.
resource "aws_s3_bucket_lifecycle_configuration" "results" {
  bucket     = aws_s3_bucket.results.id
  depends_on = [aws_s3_bucket_versioning.results]

  dynamic "rule" {
    for_each = { "runs/" = 1, "data/" = var.undelete_days, "models/" = var.undelete_days }
    content {
      id     = "deleted-${trimsuffix(rule.key, "/")}"
      status = "Enabled"
      filter {
        prefix = rule.key
      }
      noncurrent_version_expiration {
        noncurrent_days = rule.value
      }
      expiration {
        expired_object_delete_marker = true
      }
    }
  }

  rule {
    id     = "unfinished-uploads"
    status = "Enabled"
    filter {}
    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }
  }
}

resource "aws_ecr_repository" "this" {
  name                 = var.name
  image_tag_mutability = "IMMUTABLE"
  force_delete         = var.destroy_results_of == aws_s3_bucket.results.bucket
  image_scanning_configuration {
    scan_on_push = true
  }
  encryption_configuration {
    encryption_type = "KMS"
    kms_key         = aws_kms_key.this.arn
  }
}

resource "aws_ecr_lifecycle_policy" "this" {
  repository = aws_ecr_repository.this.name
  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "Keep the last 20 images"
      selection    = { tagStatus = "any", countType = "imageCountMoreThan", countNumber = 20 }
      action       = { type = "expire" }
    }]
  })
}
