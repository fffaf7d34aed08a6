output "capacity_provider" {
  description = "Name of the capacity provider."
  value       = aws_ecs_capacity_provider.this.name
}

output "group" {
  description = "Name of the Auto Scaling group."
  value       = aws_autoscaling_group.this.name
}
