#!/bin/bash
set -euo pipefail
cat >> /etc/ecs/ecs.config <<EOF
ECS_CLUSTER=${cluster}
ECS_ENABLE_GPU_SUPPORT=${gpus > 0}
ECS_ENABLE_SPOT_INSTANCE_DRAINING=true
ECS_CONTAINER_STOP_TIMEOUT=120s
ECS_IMAGE_PULL_BEHAVIOR=prefer-cached
ECS_AWSVPC_BLOCK_IMDS=true
EOF
%{ if efa ~}
if [ ! -e /dev/infiniband/uverbs0 ]; then
  cd /tmp
  curl -fsSO https://efa-installer.amazonaws.com/aws-efa-installer-1.48.0.tar.gz
  tar xf aws-efa-installer-1.48.0.tar.gz
  (cd aws-efa-installer && ./efa_installer.sh -y --minimal)
fi
%{ endif ~}
dnf install -y amazon-cloudwatch-agent
/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl -a fetch-config -m ec2 -s -c ssm:${agent_parameter}
