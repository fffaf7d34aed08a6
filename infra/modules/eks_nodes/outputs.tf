output "group" {
  description = "Name of the Auto Scaling group that EKS made."
  value       = aws_eks_node_group.this.resources[0].autoscaling_groups[0].name
}
