# What each module of nodes is told of its group's machines.
variable "machine" {
  description = "Type and number of a group's machines. `interfaces` are the kinds of the network cards' interfaces, in order; on the root disk lie images and Ray's spilled objects; `reservation_id` is a capacity reservation or block, null for none."
  type = object({
    instance_type  = string
    gpus           = number
    interfaces     = list(string)
    disk_gib       = number
    max_nodes      = number
    market         = string
    reservation_id = string
  })
  validation {
    condition     = length(var.machine.interfaces) > 0 && contains(["interface", "efa"], var.machine.interfaces[0]) && alltrue([for kind in slice(var.machine.interfaces, 1, length(var.machine.interfaces)) : kind == "efa-only"])
    error_message = "interfaces must begin with interface or efa (card 0 has the address), and go on with efa-only."
  }
  validation {
    condition     = contains(["on-demand", "spot", "capacity-block"], var.machine.market)
    error_message = "market must be on-demand, spot or capacity-block."
  }
  validation {
    condition     = var.machine.market != "capacity-block" || var.machine.reservation_id != null
    error_message = "market = capacity-block needs the block's reservation_id."
  }
}
