variable "name" {
  description = "Prefix of every name, and CloudWatch namespace of all metrics."
  type        = string
}

variable "key_arn" {
  description = "KMS key of logs and notifications."
  type        = string
}

variable "nodes" {
  description = "Groups of nodes to show: name of the Auto Scaling group, GPUs per node, instance type."
  type = map(object({
    group         = string
    gpus          = number
    instance_type = string
  }))
}

variable "head_running" {
  description = "Metric that is 1 while the Ray head runs, and what its absence means to an alarm."
  type = object({
    namespace   = string
    metric_name = string
    dimensions  = map(string)
    missing     = string
  })
}

variable "idle_minutes" {
  description = "Minutes without GPU use, or without CPU use in a group without GPUs, before the idle alarm; 0 for no such alarm."
  type        = number
}

variable "idle_actions" {
  description = "What a group's idle alarm does beside notifying, e.g. a scaling policy."
  type        = map(list(string))
}

variable "stalled_minutes" {
  description = "Minutes without a new step before the no-progress alarm."
  type        = number
}

variable "alarm_email" {
  description = "Who is told; nobody for nobody."
  type        = string
}

variable "budget_usd" {
  description = "Dollars per month at whose forecast, and at 80 % of which, the alarm topic is told."
  type        = number
}

variable "log_retention_days" {
  description = "Days that logs are kept."
  type        = number
}
