# Every target sets itself up from a fresh clone: a virtual environment, the constraints, the package.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EVIDENCE := $(VENV)/.evidence
GPU := $(VENV)/.gpu
# Apart, because transformers cannot be imported beside a torchvision whose compiled part does not load.
ZOO := .venv-zoo
NOW = $(shell date +%Y-%m-%dT%H%M%S)

.PHONY: demo test test-fast test-gpu test-gpu-full gpu-aot gpu-test lint check format bench bench-full evidence evidence-fidelity evidence-memory evidence-derived \
        evidence-plan evidence-safety clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/lowtide demo

test: $(READY)
	$(BIN)/python -m pytest

test-fast: $(READY)
	$(BIN)/python -m pytest -m "not slow"

$(GPU): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[gpu]'
	touch $(GPU)

# Without a GPU: the kernels in Triton's interpreter, and some of them compiled.
test-gpu: $(GPU)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -rs tests/test_gpu_kernels.py

test-gpu-full: $(GPU)
	TRITON_INTERPRET=1 LOWTIDE_TEST_GPU=full $(BIN)/python -m pytest -rs tests/test_gpu_kernels.py

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

check: lint
	$(BIN)/python -m pytest

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
	$(BIN)/python -m evidence.planning fit
	$(BIN)/python -m evidence.planning sizes
	$(BIN)/python -m evidence.planning page

evidence-memory: $(READY)
	$(BIN)/python -m evidence.memory

evidence-derived: $(EVIDENCE)
	$(BIN)/python -m evidence.derived

$(ZOO)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet -c constraints.txt -e '.[zoo]'
	touch $@

evidence-safety: $(ZOO)/.ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ZOO)/bin/python -m evidence.safety

clean:
	rm -rf $(VENV) $(ZOO) .mypy_cache .pytest_cache .ruff_cache dist
