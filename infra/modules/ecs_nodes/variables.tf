variable "name" {
  description = "Name of the group: of its Auto Scaling group and its capacity provider."
  type        = string
}

variable "cluster" {
  description = "ECS cluster that the hosts join."
  type        = string
}

variable "image_id" {
  description = "AMI, an ECS-optimized one."
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

variable "security_group_id" {
  description = "Security group of the hosts."
  type        = string
}

variable "instance_profile_arn" {
  description = "Instance profile of the hosts."
  type        = string
}

variable "agent_parameter" {
  description = "SSM parameter with the settings of the CloudWatch agent."
  type        = string
}
