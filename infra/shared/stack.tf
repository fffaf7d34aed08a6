# Of every stack, which each has as its versions.tf.
terraform {
  # 1.11 has write-only arguments: the Ray token never reaches the state.
  required_version = ">= 1.11"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = {
      Project   = var.name
      ManagedBy = "terraform"
    }
  }
}

variable "name" {
  description = "Prefix of every name, the same for all stacks."
  type        = string
  default     = "rayapp"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "name must be 2 to 20 lower-case letters, digits and dashes: it is part of bucket and role names."
  }
}

variable "region" {
  description = "AWS region."
  type        = string
}
