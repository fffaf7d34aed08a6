variable "name" {
  description = "Prefix of every name."
  type        = string
}

variable "capacity_gib" {
  description = "Size in GiB: 1200, or a multiple of 2400."
  type        = number
  validation {
    condition     = var.capacity_gib == 1200 || (var.capacity_gib >= 2400 && var.capacity_gib % 2400 == 0)
    error_message = "capacity_gib must be 1200 or a multiple of 2400: that is how FSx for Lustre is sold."
  }
}

variable "throughput_mb_s_per_tib" {
  description = "MB/s per TiB: 125, 250, 500 or 1000."
  type        = number
}

variable "prefixes" {
  description = "Prefixes of the bucket that appear as folders."
  type        = list(string)
}

variable "bucket" {
  description = "Bucket of data, models, checkpoints and results."
  type        = string
}

variable "key_arn" {
  description = "KMS key of the file system."
  type        = string
}

variable "vpc_id" {
  description = "The VPC."
  type        = string
}

variable "subnet_id" {
  description = "Private subnet of the nodes: another zone would cost latency and money."
  type        = string
}

variable "nodes_security_group_id" {
  description = "Security group of the nodes."
  type        = string
}
