variable "cidr" {
  description = "Addresses of the VPC; a quarter of it goes to the nodes."
  type        = string
  default     = "10.20.0.0/16"
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
