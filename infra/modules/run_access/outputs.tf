output "policy" {
  description = "Policy document, JSON."
  value       = data.aws_iam_policy_document.this.json
}
