variable "zone" {
  description = "Availability zone of all nodes; null takes the region's first. Capacity reservations fix it."
  type        = string
  default     = null
}

variable "nat" {
  description = "Whether nodes may reach the internet (HTTPS only): for hub models and public images. Without, all comes from S3 and ECR."
  type        = bool
  default     = true
}

variable "idle_minutes" {
  description = "Minutes without GPU use, or CPU use of groups without GPUs, before the idle alarm, which sets the workers to none; 0 for no such alarm. Rendered."
  type        = number
  default     = 60
}

variable "stalled_minutes" {
  description = "Minutes without a new step before the no-progress alarm."
  type        = number
  default     = 30
}

variable "alarm_email" {
  description = "Address that is told of alarms, or nobody: then they only show in CloudWatch."
  type        = string
  validation {
    condition     = var.alarm_email == "nobody" || can(regex("^[^@ ]+@[^@ ]+$", var.alarm_email))
    error_message = "alarm_email must be an address, or nobody: an alarm that reaches no one stops no bill."
  }
}

variable "secret_arns" {
  description = "Secrets and parameters that runs may read, by ARN: those of RAYAPP_SECRETS."
  type        = list(string)
  default     = []
  validation {
    condition     = alltrue([for arn in var.secret_arns : can(regex("^arn:aws[a-z-]*:(secretsmanager|ssm):", arn))])
    error_message = "secret_arns must be ARNs of Secrets Manager or of parameters of SSM."
  }
}

variable "secret_key_arns" {
  description = "KMS keys of those secrets, where they are not encrypted by AWS's own."
  type        = list(string)
  default     = []
}

variable "budget_usd" {
  description = "Dollars per month at whose forecast, and at 80 % of which, the alarm topic is told."
  type        = number
  default     = 500
}

variable "log_retention_days" {
  description = "Days that logs are kept."
  type        = number
  default     = 365
}
