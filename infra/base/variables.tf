variable "name" {
  description = "Prefix of every name."
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

variable "undelete_days" {
  description = "Days in which a deleted or overwritten object of data/ and models/ can be brought back; of runs/ it is one."
  type        = number
  default     = 14
}

variable "destroy_results_of" {
  description = "To destroy results and images with this stack, the bucket's full name; a plain destroy fails while it holds objects."
  type        = string
  default     = ""
}
