variable "name" {
  description = "Prefix of every name; that of the base stack."
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

variable "cidr" {
  description = "Addresses of the VPC; a quarter of it goes to the nodes."
  type        = string
  default     = "10.20.0.0/16"
}

variable "zone" {
  description = "Availability zone of all nodes; null takes the region's first. Capacity reservations fix it."
  type        = string
  default     = null
}

variable "zones" {
  description = "Zones in which the groups of a list of instance types may be, 1 to 3; `zone` is the first."
  type        = number
  default     = 3
  validation {
    condition     = contains([1, 2, 3], var.zones)
    error_message = "zones must be 1, 2 or 3: the addresses of the VPC are for so many."
  }
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

variable "rendered" {
  description = "Folder of head.json and worker.json as `rayapp render ecs` writes them."
  type        = string
}

variable "image_id" {
  description = "AMI of all hosts; null takes AWS's ECS-optimized one of the day."
  type        = string
  default     = null
}

variable "token_version" {
  description = "Raise it to make a new Ray token; restart head and workers after."
  type        = number
  default     = 1
}

variable "head_count" {
  description = "1, or 0 to stop the head, and with it its host."
  type        = number
  default     = 1
  validation {
    condition     = contains([0, 1], var.head_count)
    error_message = "head_count must be 0 or 1: two heads would be two clusters."
  }
}

variable "head" {
  description = "Host of the Ray head; rendered."
  type = object({
    instance_type = string
    gpus          = number
    interfaces    = list(string)
    disk_gib      = number
  })
}

variable "workers" {
  description = "Groups of worker hosts by name, with the task of each; rendered. Those of a list in order of preference are `preferred`; hosts that only prepare data need not be `placed` close to others. A second group of another market (spot beside on-demand) is a second entry."
  type = map(object({
    instance_type  = string
    gpus           = number
    interfaces     = list(string)
    disk_gib       = number
    nodes          = number
    max_nodes      = number
    market         = optional(string, "on-demand")
    reservation_id = optional(string)
    task           = optional(string, "worker")
    preferred      = optional(bool, false)
    placed         = optional(bool, true)
  }))
  validation {
    condition     = alltrue([for group in values(var.workers) : group.nodes <= group.max_nodes])
    error_message = "workers: nodes is more than max_nodes."
  }
}
