data "aws_caller_identity" "this" {}
data "aws_region" "this" {}

locals {
  region = data.aws_region.this.name
  # What nvidia-smi tells of each GPU, as the CloudWatch agent names it.
  gpu_metrics = {
    utilization_gpu         = "GPU use (%)"
    utilization_memory      = "GPU memory reads and writes (% of time)"
    memory_used             = "GPU memory used (MiB)"
    memory_free             = "GPU memory free (MiB)"
    memory_total            = "GPU memory (MiB)"
    clocks_current_graphics = "Graphics clock (MHz)"
    clocks_current_sm       = "SM clock (MHz)"
    clocks_current_memory   = "Memory clock (MHz)"
    temperature_gpu         = "Temperature (C)"
    power_draw              = "Power (W)"
  }
  training_metrics = {
    ray_rayapp_loss         = "Loss (nats per token)"
    ray_rayapp_tokens_per_s = "Tokens per second"
    ray_rayapp_mfu          = "MFU (0-1)"
    ray_rayapp_step         = "Step"
  }
  gpu_nodes = { for name, node in var.nodes : name => node if node.gpus > 0 }
}

resource "aws_cloudwatch_log_group" "ray" {
  name              = "/${var.name}/ray"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.key_arn
}

# The agent of each host; what runs inside containers (training metrics, job logs) is the head's side-car.
resource "aws_ssm_parameter" "agent" {
  #checkov:skip=CKV2_AWS_34:an agent's settings, nothing secret
  #checkov:skip=CKV_AWS_337:an agent's settings, nothing secret
  name = "/${var.name}/cloudwatch-agent"
  type = "String"
  value = jsonencode({
    agent = { metrics_collection_interval = 10 }
    metrics = {
      namespace              = var.name
      append_dimensions      = { AutoScalingGroupName = "$${aws:AutoScalingGroupName}", InstanceId = "$${aws:InstanceId}" }
      aggregation_dimensions = [["AutoScalingGroupName"]] # alarms cannot search, they need these
      metrics_collected = {
        nvidia_gpu = { measurement = sort(keys(local.gpu_metrics)) }
        mem        = { measurement = ["mem_used_percent"] }
        disk       = { measurement = ["used_percent"], resources = ["/"] }
      }
    }
  })
}

data "aws_iam_policy_document" "agent" {
  #checkov:skip=CKV_AWS_356:neither action has resources; the namespace is fixed by a condition
  #checkov:skip=CKV_AWS_111:neither action has resources; the namespace is fixed by a condition
  statement {
    sid       = "Metrics"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"] # the action has no resources; the condition names the namespace
    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = [var.name]
    }
  }
  statement {
    sid       = "OwnGroup"
    actions   = ["ec2:DescribeTags"]
    resources = ["*"] # the action has no resources; it tells the agent its Auto Scaling group
  }
  statement {
    sid       = "Settings"
    actions   = ["ssm:GetParameter"]
    resources = [aws_ssm_parameter.agent.arn]
  }
}

# One row of widgets per group of nodes, one line per GPU of each node: nothing here names a node.
resource "aws_cloudwatch_dashboard" "this" {
  dashboard_name = var.name
  dashboard_body = jsonencode({
    widgets = concat(
      [for i, metric in sort(keys(local.training_metrics)) : {
        type = "metric", x = i * 6, y = 0, width = 6, height = 6
        properties = {
          title  = local.training_metrics[metric]
          region = local.region, view = "timeSeries", period = 60, stat = "Average"
          metrics = [[{
            expression = "SEARCH('{${var.name},ClusterName,run} MetricName=\"${metric}\"', 'Average', 60)", id = "e${i}"
          }]]
        }
      }],
      flatten([for g, name in sort(keys(local.gpu_nodes)) : [
        for m, metric in sort(keys(local.gpu_metrics)) : {
          type = "metric", x = (m % 2) * 12, y = 6 + (g * 5 + floor(m / 2)) * 6, width = 12, height = 6
          properties = {
            title  = "${name} (${local.gpu_nodes[name].instance_type}): ${local.gpu_metrics[metric]}"
            region = local.region, view = "timeSeries", period = 60, stat = "Average"
            metrics = [for gpu in range(local.gpu_nodes[name].gpus) : [{
              expression = "SEARCH('{${var.name},AutoScalingGroupName,InstanceId,arch,index,name} MetricName=\"nvidia_smi_${metric}\" AutoScalingGroupName=\"${local.gpu_nodes[name].group}\" index=\"${gpu}\"', 'Average', 60)"
              id         = "gpu${gpu}"
              label      = "GPU ${gpu}"
            }]]
          }
        }
      ]])
    )
  })
}

resource "aws_sns_topic" "alarms" {
  name              = "${var.name}-alarms"
  kms_master_key_id = var.key_arn
}

data "aws_iam_policy_document" "alarms" {
  statement {
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alarms.arn]
    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.this.account_id]
    }
  }
}

resource "aws_sns_topic_policy" "alarms" {
  arn    = aws_sns_topic.alarms.arn
  policy = data.aws_iam_policy_document.alarms.json
}

resource "aws_sns_topic_subscription" "email" {
  count     = var.alarm_email == "nobody" ? 0 : 1
  topic_arn = aws_sns_topic.alarms.arn
  protocol  = "email"
  endpoint  = var.alarm_email
}

resource "aws_cloudwatch_metric_alarm" "idle" {
  for_each            = var.idle_minutes > 0 ? local.gpu_nodes : {}
  alarm_name          = "${var.name}-${each.key}-idle"
  alarm_description   = "GPUs of ${each.key} have done nothing for ${var.idle_minutes} minutes"
  namespace           = var.name
  metric_name         = "nvidia_smi_utilization_gpu"
  dimensions          = { AutoScalingGroupName = each.value.group }
  statistic           = "Maximum" # one busy GPU is not idle
  period              = 300
  evaluation_periods  = ceil(var.idle_minutes / 5)
  comparison_operator = "LessThanThreshold"
  threshold           = 5
  treat_missing_data  = "notBreaching" # no nodes
  alarm_actions       = concat([aws_sns_topic.alarms.arn], lookup(var.idle_actions, each.key, []))
}

# Of groups without GPUs that may go: those that train on CPUs or prepare data. Ray itself takes a few per cent.
resource "aws_cloudwatch_metric_alarm" "idle_cpus" {
  for_each            = { for name, node in var.nodes : name => node if var.idle_minutes > 0 && node.gpus == 0 && contains(keys(var.idle_actions), name) }
  alarm_name          = "${var.name}-${each.key}-idle"
  alarm_description   = "CPUs of ${each.key} have done nothing for ${var.idle_minutes} minutes"
  namespace           = "AWS/EC2"
  metric_name         = "CPUUtilization"
  dimensions          = { AutoScalingGroupName = each.value.group }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = ceil(var.idle_minutes / 5)
  comparison_operator = "LessThanThreshold"
  threshold           = 10
  treat_missing_data  = "notBreaching" # no nodes
  alarm_actions       = concat([aws_sns_topic.alarms.arn], var.idle_actions[each.key])
}

# A run that hangs repeats its step, and one whose driver has died tells none: its last one is repeated here. A run
# that ends says so, which counts as progress. The last step itself must be in view, so one period more is looked at.
resource "aws_cloudwatch_metric_alarm" "stalled" {
  alarm_name          = "${var.name}-no-progress"
  alarm_description   = "A run has not done a step for ${var.stalled_minutes} minutes, and has not ended: it hangs, or its driver has died"
  comparison_operator = "LessThanOrEqualToThreshold"
  evaluation_periods  = ceil(var.stalled_minutes / 5) + 1
  datapoints_to_alarm = ceil(var.stalled_minutes / 5)
  threshold           = 0
  treat_missing_data  = "notBreaching" # no run
  alarm_actions       = [aws_sns_topic.alarms.arn]
  metric_query {
    id          = "change"
    expression  = "IF(RUNNING_SUM(FILL(ended, 0)), 1, ABS(DIFF(FILL(step, REPEAT))))"
    label       = "Change of the step, or 1 after an end"
    return_data = true
  }
  metric_query {
    id = "ended"
    metric {
      namespace   = var.name
      metric_name = "ray_rayapp_failed"
      dimensions  = { ClusterName = var.name }
      stat        = "SampleCount"
      period      = 300
    }
  }
  metric_query {
    id = "step"
    metric {
      namespace   = var.name
      metric_name = "ray_rayapp_step"
      dimensions  = { ClusterName = var.name }
      stat        = "Maximum"
      period      = 300
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "failed" {
  alarm_name          = "${var.name}-run-failed"
  alarm_description   = "A run has failed: result.json in its folder says why"
  namespace           = var.name
  metric_name         = "ray_rayapp_failed"
  dimensions          = { ClusterName = var.name }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching" # told at a run's end alone
  alarm_actions       = [aws_sns_topic.alarms.arn]
}

resource "aws_cloudwatch_metric_alarm" "head" {
  alarm_name          = "${var.name}-head-down"
  alarm_description   = "The Ray head is not running: no job can be submitted, and running ones are lost"
  namespace           = var.head_running.namespace
  metric_name         = var.head_running.metric_name
  dimensions          = var.head_running.dimensions
  statistic           = "Minimum"
  period              = 60
  evaluation_periods  = 5
  comparison_operator = "LessThanThreshold"
  threshold           = 1
  treat_missing_data  = var.head_running.missing
  alarm_actions       = [aws_sns_topic.alarms.arn]
}

resource "aws_budgets_budget" "this" {
  name         = var.name
  budget_type  = "COST"
  limit_amount = format("%.1f", var.budget_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"
  cost_filter {
    name   = "TagKeyValue"
    values = [join("$", ["user:Project", var.name])]
  }
  dynamic "notification" {
    for_each = { FORECASTED = 100, ACTUAL = 80 }
    content {
      notification_type         = notification.key
      threshold                 = notification.value
      threshold_type            = "PERCENTAGE"
      comparison_operator       = "GREATER_THAN"
      subscriber_sns_topic_arns = [aws_sns_topic.alarms.arn]
    }
  }
}
