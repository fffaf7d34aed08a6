output "cluster" {
  description = "EKS cluster, for `aws eks update-kubeconfig --name`."
  value       = aws_eks_cluster.this.name
}

output "storage" {
  description = "What to give as --run.storage."
  value       = "s3://${data.aws_s3_bucket.results.bucket}/runs"
}

output "repository_url" {
  description = "ECR repository of the image."
  value       = data.aws_ecr_repository.this.repository_url
}

output "lustre" {
  description = "File system for cluster/kuberay/components/lustre; null if there is none."
  value       = one(module.lustre[*].file_system)
}

output "dashboard" {
  description = "CloudWatch dashboard."
  value       = module.observability.dashboard
}

output "log_group" {
  description = "Log group of head, workers and jobs."
  value       = module.observability.log_group.name
}
