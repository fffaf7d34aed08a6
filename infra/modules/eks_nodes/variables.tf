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
