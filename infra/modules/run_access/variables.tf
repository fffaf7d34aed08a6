variable "bucket_arn" {
  description = "Bucket of data, models, checkpoints and results."
  type        = string
}

variable "key_arn" {
  description = "KMS key of the bucket."
  type        = string
}

variable "write_prefixes" {
  description = "Prefixes that runs read and write, each with its final slash."
  type        = list(string)
  validation {
    condition     = alltrue([for prefix in var.write_prefixes : endswith(prefix, "/") && length(prefix) > 1])
    error_message = "write_prefixes must each end in a slash and not be the whole bucket, e.g. runs/."
  }
}

variable "read_prefixes" {
  description = "Prefixes that runs only read, each with its final slash."
  type        = list(string)
  validation {
    condition     = alltrue([for prefix in var.read_prefixes : endswith(prefix, "/") && length(prefix) > 1])
    error_message = "read_prefixes must each end in a slash and not be the whole bucket, e.g. data/."
  }
}

variable "secret_arns" {
  description = "Secrets and parameters that runs may read."
  type        = list(string)
}

variable "secret_key_arns" {
  description = "KMS keys of those secrets."
  type        = list(string)
}

variable "metrics_namespace" {
  description = "CloudWatch namespace that runs may publish to."
  type        = string
}
