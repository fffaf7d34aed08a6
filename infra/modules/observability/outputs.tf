output "log_group" {
  description = "Log group of head, workers and jobs."
  value       = { name = aws_cloudwatch_log_group.ray.name, arn = aws_cloudwatch_log_group.ray.arn }
}

output "agent_parameter" {
  description = "SSM parameter with the settings of the hosts' CloudWatch agent."
  value       = aws_ssm_parameter.agent.name
}

output "agent_policy" {
  description = "What the hosts' CloudWatch agent may do, JSON."
  value       = data.aws_iam_policy_document.agent.json
}

output "dashboard" {
  description = "Name of the CloudWatch dashboard."
  value       = aws_cloudwatch_dashboard.this.dashboard_name
}
