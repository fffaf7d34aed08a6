output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "subnet_id" {
  description = "Private subnet of all nodes."
  value       = aws_subnet.private.id
}

output "subnet_ids" {
  description = "Private subnet for nodes in each zone."
  value       = merge({ (local.zone) = aws_subnet.private.id }, { for zone, subnet in aws_subnet.more : zone => subnet.id })
}

output "second_subnet_ids" {
  description = "Private subnet in a second zone, if asked for."
  value       = aws_subnet.second[*].id
}

output "nodes_security_group_id" {
  description = "Security group of nodes and tasks."
  value       = aws_security_group.nodes.id
}
