# What outlives a cluster: results, the key that reads them, and images. Stacks ecs and eks find it by name.
module "storage" {
  source             = "../modules/storage"
  name               = var.name
  undelete_days      = var.undelete_days
  destroy_results_of = var.destroy_results_of
}
