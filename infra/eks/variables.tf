variable "cidr" {
  description = "Addresses of the VPC; a quarter of it goes to the nodes."
  type        = string
  default     = "10.30.0.0/16"
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
