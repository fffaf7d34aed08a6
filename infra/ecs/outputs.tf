output "cluster" {
  description = "ECS cluster."
  value       = aws_ecs_cluster.this.name
}

output "head_address" {
  description = "Where workers find the head."
  value       = "head.${aws_service_discovery_private_dns_namespace.this.name}:6379"
}

output "storage" {
  description = "What to give as --run.storage."
  value       = "s3://${data.aws_s3_bucket.results.bucket}/runs"
}

output "token_parameter" {
  description = "SSM parameter with the Ray token."
  value       = aws_ssm_parameter.token.name
}

output "dashboard" {
  description = "CloudWatch dashboard."
  value       = module.observability.dashboard
}

output "log_group" {
  description = "Log group of head, workers and jobs."
  value       = module.observability.log_group.name
}
