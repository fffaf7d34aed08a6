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
  default     = "10.30.0.0/16"
}

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

variable "kubernetes_version" {
  description = "Kubernetes minor version. 1.35 is in standard support until 2027-03-27; EKS upgrades a cluster that is older."
  type        = string
  default     = "1.35"
}

variable "api_cidrs" {
  description = "Addresses from which the API server may be reached over the internet; none by default: then only from within the VPC."
  type        = list(string)
  default     = []
  validation {
    condition     = alltrue([for cidr in var.api_cidrs : can(cidrhost(cidr, 0)) && tonumber(try(split("/", cidr)[1], 0)) >= 16])
    error_message = "api_cidrs must be networks of at least /16, e.g. 203.0.113.7/32: the API server is not for everyone."
  }
}

variable "admin_role_arns" {
  description = "Roles beside the creator that administer the cluster."
  type        = list(string)
  default     = []
}

variable "lustre_gib" {
  description = "Size of an FSx for Lustre file system with data/ and models/ of the bucket; 0 for none: rayapp streams from S3."
  type        = number
  default     = 0
}

variable "lustre_throughput_mb_s_per_tib" {
  description = "MB/s per TiB of that file system: 125, 250, 500 or 1000."
  type        = number
  default     = 250
}

variable "head" {
  description = "Nodes of the Ray head, the operator and the add-ons; rendered."
  type = object({
    instance_type = string
    gpus          = number
    interfaces    = list(string)
    disk_gib      = number
  })
}

variable "workers" {
  description = "Groups of worker nodes by name; rendered. Those that only prepare data need not be `placed` close to others."
  type = map(object({
    instance_type  = string
    gpus           = number
    interfaces     = list(string)
    disk_gib       = number
    nodes          = number
    max_nodes      = number
    autoscaled     = optional(bool, false)
    preferred      = optional(bool, false)
    placed         = optional(bool, true)
    market         = optional(string, "on-demand")
    reservation_id = optional(string)
  }))
  validation {
    condition     = alltrue([for group in values(var.workers) : group.nodes <= group.max_nodes])
    error_message = "workers: nodes is more than max_nodes."
  }
}
