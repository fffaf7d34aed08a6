output "file_system" {
  description = "What the persistent volume needs."
  value = {
    capacity_gib = aws_fsx_lustre_file_system.this.storage_capacity
    id           = aws_fsx_lustre_file_system.this.id
    dns_name     = aws_fsx_lustre_file_system.this.dns_name
    mount_name   = aws_fsx_lustre_file_system.this.mount_name
  }
}
