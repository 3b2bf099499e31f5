# Every target sets itself up from a fresh clone: a virtual environment, the constraints, the package.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EVIDENCE := $(VENV)/.evidence
GPU := $(VENV)/.gpu
# Apart, because transformers cannot be imported beside a torchvision whose compiled part does not load.
ZOO := .venv-zoo
# Apart, because these packages are large, and the default tests must pass without them.
STACKS := .venv-stacks
NOW = $(shell date +%Y-%m-%dT%H%M%S)

.PHONY: demo test test-fast test-gpu test-gpu-full gpu-aot gpu-test lint check format bench bench-full evidence \
        evidence-fidelity evidence-memory evidence-derived evidence-checkpointing evidence-plan evidence-safety \
        evidence-coverage evidence-finetuning gallery test-stacks compatibility clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/lowtide demo

# Two processes of one thread: two of two threads take nearly twice the time of the cores. Tests of threads ask for them,
# and those that wait for others give up their core at once.
TESTS := GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Triton's kernels come first, in its interpreter: that is a choice for a whole process.
test: test-gpu
	$(TESTS)

test-fast: $(READY)
	$(TESTS) -m "not slow"

$(GPU): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[gpu]'
	touch $(GPU)

# Without a GPU: the kernels in Triton's interpreter, and some of them compiled.
INTERPRETED := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/test_gpu_kernels.py

test-gpu: $(GPU)
	$(INTERPRETED)

test-gpu-full: $(GPU)
	LOWTIDE_TEST_GPU=full $(INTERPRETED)

# Without a GPU: every kernel compiled for five architectures, and its machine code looked at.
gpu-aot: $(GPU)
	$(BIN)/python benchmarks/gpu_aot.py --out benchmarks/results/gpu_aot.csv

# With a GPU, and a torch built for it: bytes, rates of kernels and steps, written to lowtide-gpu.json.
gpu-test:
	$(PYTHON) -m lowtide doctor --gpu

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

bench: $(READY)
	$(BIN)/python benchmarks/run.py --out benchmarks/results/$(NOW)

bench-full: $(READY)
	$(BIN)/python benchmarks/run.py --full --rounds 3 --out benchmarks/results/$(NOW)

$(EVIDENCE): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[evidence]'
	touch $(EVIDENCE)

evidence: $(EVIDENCE)
	$(BIN)/python -m evidence.noise
	$(BIN)/python -m evidence.training
	$(BIN)/python -m evidence.summary

evidence-fidelity: $(EVIDENCE)
	$(BIN)/python -m evidence.fidelity
	$(BIN)/python -m evidence.chart

evidence-plan: $(EVIDENCE)
	$(BIN)/python -m evidence.planning steps
	$(BIN)/python -m evidence.planning times
	$(BIN)/python -m evidence.planning blocks
	$(BIN)/python -m evidence.planning fit
	$(BIN)/python -m evidence.planning products
	$(BIN)/python -m evidence.planning sizes
	$(BIN)/python -m evidence.planning page

evidence-memory: $(READY)
	$(BIN)/python -m evidence.memory

evidence-derived: $(EVIDENCE)
	$(BIN)/python -m evidence.derived

evidence-checkpointing: $(EVIDENCE)
	$(BIN)/python -m evidence.checkpointing

$(ZOO)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet -c constraints.txt -e '.[zoo]'
	touch $@

evidence-safety: $(ZOO)/.ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ZOO)/bin/python -m evidence.safety

evidence-coverage: $(ZOO)/.ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ZOO)/bin/python -m evidence.coverage

gallery: $(EVIDENCE)
	$(BIN)/python -m evidence.gallery

$(STACKS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(STACKS)
	$(STACKS)/bin/python -m pip install --quiet -c constraints.txt -e '.[stacks]'
	touch $@

# Other packages' warnings are theirs; the default tests turn warnings into errors.
test-stacks: $(STACKS)/.ready
	$(STACKS)/bin/python -m pytest -W default tests/stacks

compatibility: $(STACKS)/.ready
	PYTHONPATH=tests $(STACKS)/bin/python -m pytest -W default -p compatibility -m stack \
	    --compatibility docs/compatibility.md tests/stacks

evidence-finetuning: $(STACKS)/.ready
	$(STACKS)/bin/python examples/lora_llama.py --page docs/finetuning.md

clean:
	rm -rf $(VENV) $(ZOO) $(STACKS) .mypy_cache .pytest_cache .ruff_cache dist
