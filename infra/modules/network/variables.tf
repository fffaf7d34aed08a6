variable "name" {
  description = "Prefix of every name."
  type        = string
}

variable "cidr" {
  description = "Addresses of the VPC; a quarter of it goes to the nodes."
  type        = string
  validation {
    condition     = can(cidrsubnet(var.cidr, 8, 0)) && tonumber(split("/", var.cidr)[1]) <= 20
    error_message = "cidr must be a network of at most /20, e.g. 10.20.0.0/16: p5 nodes take dozens of addresses each."
  }
}

variable "zone" {
  description = "Availability zone of all nodes; null takes the region's first. Capacity reservations fix it."
  type        = string
  default     = null
}

variable "zones" {
  description = "Zones in which there is a subnet for nodes, 1 to 3, as far as the region has them."
  type        = number
  default     = 1
}

variable "second_zone" {
  description = "Whether to have a small subnet in a second zone, as the EKS control plane wants."
  type        = bool
  default     = false
}

variable "nat" {
  description = "Whether nodes may reach the internet (HTTPS only) through a NAT gateway."
  type        = bool
}

variable "interface_endpoints" {
  description = "AWS services reached without the internet, e.g. ecr.api."
  type        = list(string)
}

variable "key_arn" {
  description = "KMS key of the log group."
  type        = string
}

variable "log_retention_days" {
  description = "Days that flow logs are kept."
  type        = number
}
