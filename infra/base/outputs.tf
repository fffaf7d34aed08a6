output "bucket" {
  description = "Bucket of data, models, checkpoints and results."
  value       = module.storage.bucket
}

output "storage" {
  description = "What to give as --run.storage."
  value       = "s3://${module.storage.bucket}/runs"
}

output "repository_url" {
  description = "Where to push the image."
  value       = module.storage.repository_url
}
