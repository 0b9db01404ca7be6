# Every target works on a machine that has only python3 with pip: it makes its own environment in $(VENV).
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST_TRL := $(VENV)/trl-1.15.0
OLDEST_TRITON := $(VENV)/triton-3.6.0
HUB_KERNELS := $(VENV)/kernels-0.17.2
TORCHTUNE := $(VENV)/torchtune-0.6.1
LIGER := $(VENV)/liger-kernel-0.8.5
FLASH_SOURCES := $(VENV)/flash-attention
QUANTIZERS := $(VENV)/quantizers
TEST_FOLDERS := OLDEST_TRL=$(abspath $(OLDEST_TRL)) HUB_KERNELS=$(abspath $(HUB_KERNELS)) \
	FLASH_SOURCES=$(abspath $(FLASH_SOURCES)) QUANTIZERS=$(abspath $(QUANTIZERS)) \
	TORCHTUNE=$(abspath $(TORCHTUNE))
TEST_PACKAGES := $(OLDEST_TRL) $(HUB_KERNELS) $(FLASH_SOURCES) $(QUANTIZERS) $(TORCHTUNE)

# Each minor version of TRL between its rewrite and its fused head.
TRL_VERSIONS := 0.29.1 1.0.0 1.1.0 1.2.0 1.3.0 1.4.0 1.5.1 1.6.0 1.7.1 1.8.0 1.9.0 1.10.0 1.11.0 1.12.0 1.13.0 1.14.2
# Those that begin a series whose passes fastdpo replaces in one way: 0.29 truncates after collation, 1.0 before it; 1.6
# moves what precomputes a reference; since 1.9 that function takes the model; 1.14 splits the loss.
TRL_SEAMS := 0.29.1 1.0.0 1.6.0 1.9.0 1.14.2
REQUESTS := $(VENV)/requests

LEGACY := .venv-legacy
OPENRLHF := .venv-openrlhf
LLAMAFACTORY := .venv-llamafactory
DEEPSPEED := .venv-ranks
SWIFT := .venv-swift
AXOLOTL := .venv-axolotl
NEWEST := .venv-newest
OLDEST_TORCH := .venv-torch-2.11.0
PACKAGING := .venv-packaging
SITE := .venv-site
WHEEL := .venv-wheel

# Environments are kept, also those that only a pattern names.
.SECONDARY:

.PHONY: demo test test-all test-apart test-once test-everything test-sabotages test-census test-ptx test-legacy test-legacy-newest \
	test-legacy-oldest test-trl-versions test-trl-seams test-openrlhf test-ranks test-programs test-llamafactory \
	test-swift test-swift-newest test-swift-oldest test-axolotl test-oldest-torch test-newest left-out measure-programs fuzz dist try-wheel hub lint docs notebook site \
	bench bench-llamafactory bench-ops bench-gpu gpu-day-1 gpu-day-2 gpu-wheels gpu-flash-attn clean

demo: $(READY)
	$(BIN)/python -m benchmarks.demo $(ARGS)

# A worker more than there are cores, since tests wait for processes, but at most 4: each takes up to 2 GiB of memory.
# One that is done takes tests over from the others.
WORKERS ?= $(shell python3 -c "import os; print(min(len(os.sched_getaffinity(0)) + 1, 4))")
IN_PARALLEL = -n $(WORKERS) --dist worksteal
TESTS = OMP_NUM_THREADS=1 $(TEST_FOLDERS) $(BIN)/python -m pytest $(IN_PARALLEL)

# Files that `make test` leaves to `make test-apart`: families of models, and tests that start interpreters, compilers,
# programs or ranks, which takes most of their time.
APART := $(addprefix tests/,benchmarks kernels programs/trl test_check.py test_commands.py test_doctor.py \
	test_examples.py test_packaging.py test_quickstart.py test_readme.py test_run.py test_run_lines.py \
	$(patsubst %,contract/test_%.py,families planted ranks) ref_logps/test_ranks.py test_metrics.py \
	$(patsubst %,models/test_%.py,cuts mixer_kernels mixers sequence_groups sequence_refusals sharding) \
	$(patsubst %,integrations/test_%.py,copied_trainers custom_loops_on_ranks hub_kernels logged_metrics loops_of_others \
	newer_versions patch_imports quantized trl_oldest trl_vllm versions) \
	$(patsubst %,integrations/trl_dpo/test_%.py,compiled families images models))

# Each value of each parameter at least once, without what is slow and guards little.
test: $(READY) $(TEST_PACKAGES)
	$(TESTS) --quick $(addprefix --ignore ,$(APART)) $(ARGS)

# What `make test` leaves out.
test-apart: $(READY) $(TEST_PACKAGES)
	$(TESTS) $(APART) --quick $(ARGS)

# Every combination of parameters, and every test.
test-all: $(READY) $(TEST_PACKAGES)
	$(TESTS) $(ARGS)

# What CI runs in other environments: each trainer line and each program, once. The longest come first, for
# `make --jobs 2`.
test-once: ONCE := --quick
test-once: DETAILED := 1.14.2
test-once: LEGACY_OLDEST_TESTS := $(addprefix tests/contract/,test_options.py test_verifying.py) tests/legacy/test_run.py
test-once: test-ranks test-swift-newest test-llamafactory test-legacy test-axolotl test-openrlhf test-trl-seams test-census

# The same with every version and every combination, for hours.
test-everything: test-all test-ranks test-programs test-legacy test-openrlhf test-trl-versions test-census test-ptx

# The versions of trainers that `make test-once` leaves out.
left-out:
	@echo $(addprefix trl==,$(filter-out $(TRL_SEAMS),$(TRL_VERSIONS)))

# Changes of the source, one for each promise and capability, each of which a test must notice: tests/sabotages.toml.
test-sabotages: $(READY) $(TEST_PACKAGES)
	$(TEST_FOLDERS) $(BIN)/python -m tests.support.sabotages $(ARGS)

# 100,000 random cases of the properties of which `make test` runs a seeded part.
fuzz: $(READY)
	FASTDPO_FUZZ=100000 $(BIN)/python -m pytest tests/fuzz tests/models/test_pace.py::test_drawn_worlds \
		tests/models/test_activations.py::test_drawn_worlds $(ARGS)

# Before a release: ops on a CPU, with kernels that are compiled for NVIDIA architectures and executed in NumPy by
# tools/ptx, and its own tests.
PTX_TARGETS ?= sm80 sm90
PTX_TESTS := $(patsubst %,tests/ops/test_%.py,contract token_logps linear_logps packed_attention) \
	-k "plain_pytorch or each_mode or a_gap_of or large_logits or special_rows or probability or (every_feature and pairs and not blocks)"
test-ptx: $(READY)
	status=0; $(BIN)/python -m pytest tools/ptx/tests $(ARGS) || status=1; for target in $(PTX_TARGETS); do \
		$(BIN)/python -m pytest -p tools.ptx.plugin --target $$target $(PTX_TESTS) $(ARGS) || status=1; \
	done; exit $$status

# The kernels compiled by the oldest Triton that is supported, that of CUDA builds of torch 2.11.
test-census: $(READY) $(OLDEST_TRITON)
	PYTHONPATH=$(abspath $(OLDEST_TRITON)) \
		$(BIN)/python -m pytest tests/kernels/test_census.py $(ONCE) $(ARGS)

# TRL before its rewrite, the newest and the oldest that is supported.
test-legacy: test-legacy-newest test-legacy-oldest

test-legacy-newest: $(LEGACY)/.ready
	$(LEGACY)/bin/python -m pytest tests/contract tests/legacy $(ONCE) $(ARGS)

LEGACY_OLDEST_TESTS := tests/contract tests/legacy
test-legacy-oldest: $(LEGACY)/.ready
	PYTHONPATH=$(abspath $(LEGACY)/trl-0.24.0) $(LEGACY)/bin/python -m pytest $(LEGACY_OLDEST_TESTS) $(ONCE) $(ARGS)

# TRL from its rewrite to its fused head, each version in a process of its own; `make --jobs 2` runs two at a time.
# `DETAILED` are the versions that run all losses and options.
test-trl-versions: $(addprefix test-trl-,$(TRL_VERSIONS))
test-trl-seams: $(addprefix test-trl-,$(TRL_SEAMS))

DETAILED := 0.29.1 1.9.0 1.14.2
IN_DETAIL := tests/trl_versions $(patsubst %,tests/contract/test_%.py,options unpatching faults)
IN_SHORT := $(addprefix tests/trl_versions/,test_dpo.py test_max_tokens.py test_online_dpo.py test_reward.py test_run.py)
TRL_TESTS = $(if $(filter $*,$(DETAILED)),$(IN_DETAIL),$(IN_SHORT))
# TRL 0.29 has no pass that can be replaced by that of fastdpo, and no router losses.
WITHOUT_A_PASS = $(if $(filter 0.29.1,$(filter $*,$(DETAILED))),-k "not precompute and not router")

test-trl-%: $(VENV)/trl-% $(REQUESTS)
	PYTHONPATH=$(abspath $(VENV)/trl-$*):$(abspath $(REQUESTS)) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest --quick -p no:cacheprovider $(TRL_TESTS) $(WITHOUT_A_PASS) $(ARGS)

test-openrlhf: $(OPENRLHF)/.ready
	$(OPENRLHF)/bin/python -m pytest tests/contract tests/openrlhf $(ONCE) $(ARGS)

# Real programs, each in an environment of its own, started by their own commands.
test-programs: test-llamafactory test-swift test-axolotl

# The rows of the programs in docs/results.md: longer trainings, of which each is repeated.
measure-programs: ARGS := --measure $(abspath out/programs)
measure-programs: test-llamafactory test-axolotl $(SWIFT)/.ready $(READY)
	$(BIN)/python -m pytest tests/programs/trl $(ARGS)
	$(SWIFT)/bin/python -m pytest tests/programs/swift $(ARGS)

test-llamafactory: $(LLAMAFACTORY)/.ready
	$(LLAMAFACTORY)/bin/python -m pytest tests/contract tests/programs/llamafactory $(ONCE) $(ARGS)

bench-llamafactory: $(LLAMAFACTORY)/.ready
	$(LLAMAFACTORY)/bin/python -m benchmarks.run --suite llamafactory --json out/llamafactory.json $(ARGS)

# TRL's DPOTrainer on RANKS processes (2 unless it is set), under DDP, FSDP2 and DeepSpeed.
test-ranks: $(DEEPSPEED)/.ready
	$(DEEPSPEED)/bin/python -m pytest tests/ranks $(ONCE) $(ARGS)

# ms-swift with the newest TRL that it takes, and with one before that TRL's rewrite of DPOTrainer.
test-swift: test-swift-newest test-swift-oldest

test-swift-newest: $(SWIFT)/.ready
	$(SWIFT)/bin/python -m pytest tests/contract tests/programs/swift $(ONCE) $(ARGS)

test-swift-oldest: $(SWIFT)/.ready
	PYTHONPATH=$(abspath $(SWIFT)/trl-0.28.0) $(SWIFT)/bin/python -m pytest tests/contract tests/programs/swift $(ONCE) $(ARGS)

test-axolotl: $(AXOLOTL)/.ready
	$(AXOLOTL)/bin/python -m pytest tests/programs/axolotl $(ONCE) $(ARGS)

# The oldest torch that is supported. PyPI has it for CUDA only: several GB.
$(OLDEST_TORCH)/.ready: TORCH := torch==2.11.0
$(OLDEST_TORCH)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	$(call torch_in,$(OLDEST_TORCH))
	grep -v "^setuptools=" constraints/pins.txt > $(OLDEST_TORCH)/pins.txt  # torch requires an older one
	$(OLDEST_TORCH)/bin/pip install --quiet -c $(OLDEST_TORCH)/pins.txt $(call triton_for,$(OLDEST_TORCH)) "$(TORCH)" \
		-e ".[trl,dev]"
	touch $@

test-oldest-torch: $(OLDEST_TORCH)/.ready $(HUB_KERNELS) $(FLASH_SOURCES)
	OMP_NUM_THREADS=1 $(TEST_FOLDERS) $(OLDEST_TORCH)/bin/python -m pytest $(IN_PARALLEL) tests/ops \
		tests/models/test_attention.py tests/models/test_graphs.py tests/integrations/trl_dpo/test_compiled.py --quick $(ARGS)

# The newest versions that the index has, in an environment that is made anew: torch for CUDA, 5 GB. Prints which functions
# differ from the tested ones, and runs the tests of `make test` and `make test-apart`. If all pass, it writes the versions
# into docs/support.md. PIP_PRE=1 takes pre-releases too, and NEWEST_TESTS a part of the tests, which writes nothing.
TESTED_VERSIONS := $(shell grep -E "^(trl|transformers|accelerate|peft)==" constraints/pins.txt)
NEWEST_TESTS ?=
# Two need the pinned versions: what they would show has been printed. One needs the versions that are written at the end,
# which are those of `packages.TESTED`, set before.
NOT_NEWEST := tests/integrations/test_newer_versions.py::test_the_recorded_code_is_that_of_the_installed_versions \
	tests/integrations/test_changed_code.py::test_the_versions_of_a_run_are_written_and_tested \
	tests/integrations/trl_dpo/test_families.py::test_the_support_page_is_up_to_date
test-newest: $(READY) $(TEST_PACKAGES)
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --no-cache-dir torch
	$(NEWEST)/bin/pip install --quiet --no-cache-dir setuptools -e ".[trl,bench,dev]"
	$(NEWEST)/bin/pip install --quiet --no-deps --target $(NEWEST)/tested $(TESTED_VERSIONS)
	$(NEWEST)/bin/python -m tests.support.documents.changed_code $(NEWEST)/tested
	OMP_NUM_THREADS=1 $(TEST_FOLDERS) $(NEWEST)/bin/python -m pytest $(IN_PARALLEL) -p no:cacheprovider --quick \
		$(addprefix --deselect ,$(NOT_NEWEST)) $(NEWEST_TESTS) $(ARGS)
	$(if $(NEWEST_TESTS),,$(NEWEST)/bin/python -m tests.support.documents.newest && \
		$(BIN)/python -m tests.support.documents.support_tables)

# The sdist, and the wheel that is built from it.
dist: $(PACKAGING)/.ready
	rm -rf dist build
	$(PACKAGING)/bin/python -m build --no-isolation --outdir dist .
	$(PACKAGING)/bin/twine check --strict dist/*

# Installs the wheel next to TRL in an empty environment, and compares a training there with TRL's own. `PYTHON` selects
# the version of Python.
try-wheel: dist
	rm -rf $(WHEEL)
	$(call torch_in,$(WHEEL))
	$(WHEEL)/bin/pip install --quiet $(call triton_for,$(WHEEL)) "$(TORCH)" "$$(echo dist/*.whl)[trl]"
	cd $(WHEEL) && FASTDPO_STRICT=1 bin/fastdpo check --tiny

# The form of kernels/ for Hugging Face's Kernel Hub.
hub:
	rm -rf out/hub
	$(PYTHON) tools/kernel_hub.py out/hub

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

docs: $(READY)
	$(BIN)/python -m tests.support.documents.support_tables
	$(BIN)/python docs/draw_layout.py
	$(BIN)/python -m tests.support.documents.reason_sections
	$(BIN)/python -m tests.support.documents.speedups

# The notebook with its output.
notebook: $(READY)
	$(BIN)/jupyter execute --inplace examples/quickstart.ipynb

# The documentation as pages in out/site, with the benchmarks, an API reference and search. A dead link or a page that
# nothing leads to is an error.
site: export NO_MKDOCS_2_WARNING := 1
site: $(SITE)/.ready $(READY)
	$(BIN)/python -m benchmarks.report --site out/benchmarks.md
	$(SITE)/bin/mkdocs build

SUITES ?= step hybrid online kto grpo accumulated kept reward vision head loss attention host memory

# With Liger, two of whose heads run on a CPU.
bench: export PYTHONPATH := $(abspath $(LIGER)):$(PYTHONPATH)
bench: $(READY) $(LIGER)
	status=0; for suite in $(SUITES); do \
		$(BIN)/python -m benchmarks.run --suite $$suite --json out/$$suite.json $(ARGS) || status=1; \
	done; exit $$status

bench-ops: $(READY)
	mkdir -p out
	$(BIN)/python -m pytest benchmarks/test_ops.py --benchmark-only --benchmark-group-by=group \
		--benchmark-columns=median,iqr,rounds --benchmark-json=out/ops.json $(ARGS)

# On a machine with a GPU, with the Python that is installed there. If the tests of the ops fail, no suite is timed, nor
# is a training. The accuracy is measured in any case, and one failing step makes the exit status non-zero. With
# GPU_DEVICE=cpu and ARGS=--quick, the same steps run on small cases without a GPU.
GPU_PYTHON ?= python3
GPU_DEVICE ?= cuda
GPU_TESTS ?= --quick
GPU_SUITES ?= attention step head online reward
GPU_ROUNDS = $(if $(filter --quick,$(ARGS)),,--rounds 7)
GPU_OUT := out/$(if $(filter cuda,$(GPU_DEVICE)),gpu,$(GPU_DEVICE))

bench-gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
bench-gpu:
	status=0; suites="$(GPU_SUITES)"; \
	$(GPU_PYTHON) -m benchmarks.device_tests --device $(GPU_DEVICE) --logs $(GPU_OUT) $(GPU_TESTS) || { \
		status=1; suites=; echo "bench-gpu: the tests of the ops failed; no suite is timed" >&2; \
	}; \
	for suite in $$suites; do \
		$(GPU_PYTHON) -m benchmarks.run --suite $$suite --resume $(GPU_ROUNDS) --json $(GPU_OUT)/$$suite.json $(ARGS) \
			|| status=1; \
	done; \
	if [ -n "$$suites" ]; then \
		$(GPU_PYTHON) -m benchmarks.trainings --steps 5 --json $(GPU_OUT)/trainings.json $(filter --quick,$(ARGS)) || status=1; \
	fi; \
	$(GPU_PYTHON) -m benchmarks.accuracy --json $(GPU_OUT)/accuracy.json $(filter --quick,$(ARGS)) || status=1; \
	exit $$status

# A quarter of an hour on a GPU in two commands, what matters most first. Each line ends after its seconds at the latest,
# and the next one runs whatever became of it: what is printed last says how each has ended, 0 if well, 124 if it took
# too long. JSON is written after each case. With GPU_DEVICE=cpu and ARGS=--quick, small cases of a GPU run without one.
# Sides take turns, with the weights of all in memory: 90 GB at 8B, or ARGS=--one-by-one.
WITHIN := timeout --kill-after 5
ENDED = ; echo "exit status $$?: $(1)" >> $(GPU_OUT)/$@.txt
GPU_STEPS = $(GPU_PYTHON) -m benchmarks.run --suite step --resume --rounds 3 --json $(GPU_OUT)/step.json $(ARGS) --sides \
	"^(TRL as shipped|fastdpo|fastdpo, (compiled layers|CUDA graphs of compiled layers|patch.. alone))$$"
gpu-day-1 gpu-day-2: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu-day-1 gpu-day-2: export GPU_CASES := 1
gpu-day-1:
	mkdir -p $(GPU_OUT) && rm -f $(GPU_OUT)/$@.txt
	$(WITHIN) 80 $(GPU_PYTHON) -m benchmarks.device_tests --device $(GPU_DEVICE) --logs $(GPU_OUT) --seconds 70 \
		$(GPU_TESTS) $(call ENDED,tests of the ops)
	$(WITHIN) 290 $(GPU_STEPS) --cases "^0.5B, full/" --seconds 220 $(call ENDED,steps of 0.5B)
	$(WITHIN) 190 $(GPU_PYTHON) -m benchmarks.trainings --steps 15 --sides "^(TRL as shipped|fastdpo|fastdpo, max_tokens.*)$$" \
		--json $(GPU_OUT)/trainings.json $(filter --quick,$(ARGS)) $(call ENDED,trainings)
	@cat $(GPU_OUT)/$@.txt

gpu-day-2:
	mkdir -p $(GPU_OUT) && rm -f $(GPU_OUT)/$@.txt
	$(WITHIN) 220 $(GPU_STEPS) --cases "^8B, LoRA, checkpointing" --seconds 140 $(call ENDED,steps of 8B with LoRA)
	$(WITHIN) 130 $(GPU_STEPS) --cases "^8B, QLoRA" --sides "^(TRL as shipped|fastdpo|fastdpo, compiled layers)$$" --seconds 90 \
		$(call ENDED,steps of 8B with QLoRA)
	$(WITHIN) 80 $(GPU_PYTHON) -m benchmarks.run --suite accumulated --rounds 2 --seconds 50 \
		--json $(GPU_OUT)/accumulated.json $(ARGS) $(call ENDED,accumulated steps)
	$(WITHIN) 75 $(GPU_PYTHON) -m benchmarks.run --suite attention --cases "prompt as long|heads of 64$$|UltraFeedback|quick" \
		--seconds 45 --json $(GPU_OUT)/attention.json $(ARGS) $(call ENDED,attention)
	$(WITHIN) 90 $(GPU_STEPS) --cases "^8B, LoRA/" --one-by-one --seconds 60 $(call ENDED,8B without checkpointing)
	@cat $(GPU_OUT)/$@.txt

# The wheels that a machine with a GPU lacks, for Python 3.12, and the sources of flash-attn 2, in out/gpu/wheels.
# Their requirements are checked against each other and against tools/gpu-machine.txt. There:
# `pip install --no-deps --no-index --find-links out/gpu/wheels -r tools/gpu-wheels.txt`, without `--target`: datasets
# cannot hash functions that see a pyarrow outside of site-packages. All are 225 MB. bitsandbytes keeps its libraries for
# a CPU and for CUDA 13 alone: 4 MB instead of 43. What is too large to be carried at once goes in halves, such as
# nvidia-cutlass-dsl-libs-cu13 (92 MB, which flash-attn 4 needs): `split -b 46M FILE PART.`, and there `cat PART.* > FILE`.
GPU_WHEELS := out/gpu/wheels
FOR_GPU := --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $(addprefix --platform manylinux,\
	_2_28_x86_64 _2_24_x86_64 _2_17_x86_64 2014_x86_64)
gpu-wheels: $(READY) $(FLASH_SOURCES)
	rm -f $(GPU_WHEELS)/bitsandbytes-*.whl
	$(BIN)/pip download --quiet $(FOR_GPU) --dest $(GPU_WHEELS) -r tools/gpu-wheels.txt
	$(BIN)/python tools/thin_wheel.py $(GPU_WHEELS)/bitsandbytes-*.whl "_(cuda1[12]\d|cuda132|rocm\d+|xpu\d+)[.]so$$"
	$(BIN)/pip install --quiet $(FOR_GPU) --no-index --find-links $(GPU_WHEELS) --target $(GPU_WHEELS)/unused --dry-run \
		-r tools/gpu-wheels.txt
	$(BIN)/python tools/check_wheels.py $(GPU_WHEELS) tools/gpu-machine.txt
	cp $(FLASH_SOURCES)/$(FLASH_SOURCE) $(GPU_WHEELS)

# On a machine with nvcc: a wheel of flash-attn 2 for Hopper in out/gpu, restricted to bfloat16, to head sizes 64 and
# 128, and to what has neither dropout nor ALiBi. It takes minutes on 16 cores. Its setup.py needs the torch that is
# installed there.
FLASH_SOURCE := flash_attn-2.8.3.post2.tar.gz
FLASH_BUILD := out/gpu/flash-attn
gpu-flash-attn:
	rm -rf $(FLASH_BUILD)
	mkdir -p $(FLASH_BUILD)
	tar -xzf $(firstword $(wildcard $(GPU_WHEELS)/$(FLASH_SOURCE) $(FLASH_SOURCES)/$(FLASH_SOURCE))) \
		-C $(FLASH_BUILD) --strip-components 1
	$(GPU_PYTHON) tools/restrict_flash_attn.py $(FLASH_BUILD)
	FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS=90 MAX_JOBS=$$(nproc) NVCC_THREADS=1 \
		$(GPU_PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir out/gpu ./$(FLASH_BUILD)

# torch first and by its exact version: an unpinned one, or one that a package pulls, may be another build.
define torch_in
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --upgrade-strategy only-if-needed "$(TORCH)"
endef

# pip's options: Triton is pinned beside a CPU build of torch.
triton_for = $$($(1)/bin/python -c "import torch; print(end='' if torch.version.cuda or torch.version.hip else '-c constraints/cpu.txt')")

# Installs under the constraints of a file: the build of torch that is there, pytest, and what the line goes on with.
install_in = $(1)/bin/pip install --quiet -c constraints/$(2).txt $(call triton_for,$(1)) "$(TORCH)" setuptools "pytest>=9"

$(READY): pyproject.toml $(wildcard constraints/*.txt)
	$(call torch_in,$(VENV))
	$(call install_in,$(VENV),pins) -e ".[trl,bench,dev]"
	touch $@

$(LEGACY)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	$(call torch_in,$(LEGACY))
	$(call install_in,$(LEGACY),legacy) -e ".[trl-legacy]"
	$(LEGACY)/bin/pip install --quiet --no-deps --target $(LEGACY)/trl-0.24.0 trl==0.24.0
	touch $@

# OpenRLHF without its dependencies: among them is flash-attn, which needs a GPU's compiler.
$(OPENRLHF)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	$(call torch_in,$(OPENRLHF))
	$(call install_in,$(OPENRLHF),openrlhf) wheel -e . \
		accelerate datasets einops peft psutil pylatexenc sympy torchdata tqdm transformers
	$(OPENRLHF)/bin/pip install --quiet -c constraints/openrlhf.txt --no-build-isolation deepspeed "ray[train]"
	$(OPENRLHF)/bin/pip install --quiet --no-deps openrlhf==0.11.2
	touch $@

# ms-swift without its dependencies: among them are those of its web interface and of its server.
$(SWIFT)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	$(call torch_in,$(SWIFT))
	$(call install_in,$(SWIFT),swift) -e . \
		accelerate binpacking datasets einops json_repair modelscope peft pillow transformers
	$(SWIFT)/bin/pip install --quiet --no-deps -c constraints/swift.txt ms-swift trl
	$(SWIFT)/bin/pip install --quiet --no-deps --target $(SWIFT)/trl-0.28.0 trl==0.28.0
	touch $@

# LLaMA-Factory without its dependencies: most are for its web interface and for images. It imports torchaudio, whose
# extension is built for CUDA only. Without the extension, torchaudio can be imported next to any torch.
$(LLAMAFACTORY)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	$(call torch_in,$(LLAMAFACTORY))
	$(call install_in,$(LLAMAFACTORY),llamafactory) -e . \
		accelerate datasets omegaconf peft pillow psutil rich scipy tabulate transformers
	$(LLAMAFACTORY)/bin/pip install --quiet --no-deps llamafactory==0.9.5 torchaudio==2.11.0 trl==0.24.0
	rm -f $(LLAMAFACTORY)/lib/python*/site-packages/torchaudio/lib/*.so
	touch $@

# axolotl without its dependencies: most are for GPUs, for storage of clouds and for its web interface.
$(AXOLOTL)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	$(call torch_in,$(AXOLOTL))
	$(call install_in,$(AXOLOTL),axolotl) -e . \
		accelerate addict colorama datasets fire packaging peft pydantic pyyaml requests transformers trl
	$(AXOLOTL)/bin/pip install --quiet --no-deps -c constraints/axolotl.txt axolotl axolotl-contribs-lgpl \
		axolotl-contribs-mit bitsandbytes distro evaluate fastcore gitdb gitpython llvmlite numba opentelemetry-api \
		opentelemetry-sdk pillow platformdirs posthog protobuf python-dotenv sentry-sdk smmap wandb
	touch $@

$(DEEPSPEED)/.ready: pyproject.toml $(wildcard constraints/*.txt)
	$(call torch_in,$(DEEPSPEED))
	$(call install_in,$(DEEPSPEED),pins) wheel -e ".[trl]"
	$(DEEPSPEED)/bin/pip install --quiet -c constraints/pins.txt --no-build-isolation deepspeed "ray[train]"
	touch $@

$(PACKAGING)/.ready: constraints/pins.txt
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/pip install --quiet -c constraints/pins.txt build setuptools twine
	touch $@

$(SITE)/.ready: constraints/pins.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet -c constraints/pins.txt mkdocs-material "mkdocstrings[python]" ruff
	touch $@

# Another version of TRL, for tests that put it in front of the one that is installed.
$(VENV)/trl-%: $(READY)
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --target $@ trl==$*
	touch $@

# OnlineDPOTrainer imports it before TRL 1.14.
$(REQUESTS): $(READY)
	rm -rf $@
	$(BIN)/pip install --quiet --target $@ requests
	touch $@

# Without its dependencies, torch and Triton, which are there.
$(LIGER): $(READY)
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --target $@ liger-kernel==0.8.5
	touch $@

# Without torch, and with what its import needs. Tests put it in front of the packages that are installed.
$(TORCHTUNE): $(READY)
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --target $@ torchtune==0.6.1 torchao==0.13.0 torchdata==0.11.0 omegaconf==2.4.0 \
		antlr4-python3-runtime==4.9.3 sentencepiece==0.2.3 tiktoken==0.14.0 blobfile==3.3.0 kagglehub==1.0.3 \
		lxml==6.1.3 pycryptodomex==3.24.2
	touch $@

$(OLDEST_TRITON): $(READY)
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --target $@ triton==3.6.0
	touch $@

# Not in the environment: where it is installed, transformers looks for kernels on the Hub.
$(HUB_KERNELS): $(READY)
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --target $@ kernels==0.17.2
	touch $@

# Not in the environment, since transformers and PEFT look for them wherever they are.
$(QUANTIZERS): $(READY)
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --target $@ bitsandbytes==0.50.2 torchao==0.18.0
	touch $@

# The packages of flash-attention whose functions are called. They are read, not installed. pip asks the setup.py of an
# sdist for its metadata, which needs torch but builds nothing.
$(FLASH_SOURCES): $(READY)
	rm -rf $@ $@.part
	for package in flash-attn==2.8.0.post2 flash-attn==2.8.3.post2; do \
		FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(BIN)/pip download --quiet --no-deps --no-build-isolation \
			--no-binary flash-attn --dest $@.part $$package || exit 1; \
	done
	$(BIN)/pip download --quiet --no-deps --only-binary flash-attn-4 --dest $@.part flash-attn-4==4.0.0b36
	mv $@.part $@

clean:
	rm -rf $(VENV) $(LEGACY) $(OPENRLHF) $(LLAMAFACTORY) $(DEEPSPEED) $(SWIFT) $(AXOLOTL) $(NEWEST) $(PACKAGING) $(SITE) $(WHEEL) build dist out *.egg-info src/*.egg-info
