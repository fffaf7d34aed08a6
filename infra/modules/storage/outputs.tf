output "bucket" {
  description = "Bucket of data, models, checkpoints and results."
  value       = aws_s3_bucket.results.bucket
}

output "repository_url" {
  description = "ECR repository of the image."
  value       = aws_ecr_repository.this.repository_url
}
