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
