output "group" {
  description = "Name of the Auto Scaling group that EKS made."
  value       = one(concat(aws_eks_node_group.this, aws_eks_node_group.autoscaled)).resources[0].autoscaling_groups[0].name
}
