variable "name" {
  description = "Name of the node group."
  type        = string
}

variable "group" {
  description = "Short name by which manifests choose this group (label rayapp/group)."
  type        = string
}

variable "cluster" {
  description = "EKS cluster that the nodes join."
  type        = string
}

variable "instance_type" {
  description = "EC2 instance type."
  type        = string
}

variable "gpus" {
  description = "GPUs of one node."
  type        = number
}

variable "interfaces" {
  description = "Kind of each network card's interface, in order: interface, efa, or efa-only."
  type        = list(string)
  validation {
    condition     = length(var.interfaces) > 0 && contains(["interface", "efa"], var.interfaces[0]) && alltrue([for kind in slice(var.interfaces, 1, length(var.interfaces)) : kind == "efa-only"])
    error_message = "interfaces must begin with interface or efa (card 0 has the address), and go on with efa-only."
  }
}

variable "disk_gib" {
  description = "Size of the root disk in GiB; images and Ray's spilled objects lie there."
  type        = number
}

variable "min_nodes" {
  description = "Fewest nodes."
  type        = number
}

variable "scaled_elsewhere" {
  description = "Whether the cluster autoscaler or `rayapp capacity` sets the number of nodes."
  type        = bool
  default     = false
}

variable "nodes" {
  description = "Nodes; at first, where they are scaled elsewhere."
  type        = number
}

variable "max_nodes" {
  description = "Most nodes."
  type        = number
}

variable "market" {
  description = "How nodes are bought: on-demand, spot or capacity-block."
  type        = string
  validation {
    condition     = contains(["on-demand", "spot", "capacity-block"], var.market)
    error_message = "market must be on-demand, spot or capacity-block."
  }
  validation {
    condition     = var.market != "capacity-block" || var.reservation_id != null
    error_message = "market = capacity-block needs the block's reservation_id."
  }
}

variable "reservation_id" {
  description = "Capacity reservation or capacity block to use; null for none."
  type        = string
}

variable "placement_group" {
  description = "Cluster placement group; null for none."
  type        = string
}

variable "subnet_id" {
  description = "Private subnet."
  type        = string
}

variable "security_group_ids" {
  description = "Security groups of the nodes: the cluster's and the nodes' own."
  type        = list(string)
}

variable "node_role_arn" {
  description = "Role of the nodes."
  type        = string
}

variable "agent_parameter" {
  description = "SSM parameter with the settings of the CloudWatch agent."
  type        = string
}
