variable "name" {
  description = "Prefix of every name."
  type        = string
}

variable "undelete_days" {
  description = "Days in which a deleted or overwritten object of data/ and models/ can be brought back; of runs/ it is one."
  type        = number
  validation {
    condition     = var.undelete_days >= 1
    error_message = "undelete_days must be at least 1."
  }
}

variable "destroy_results_of" {
  description = "Name of the bucket whose objects, and the images, may be destroyed; empty keeps them."
  type        = string
}
