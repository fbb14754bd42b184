# `make demo` and `make test` are all a fresh machine with Python and make needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
LOWEST := .venv-lowest

# What `make test-integrations` installs and tests.
EXTRAS ?= accelerate,transformers,lightning,ray,torchft

# More than there are cores, as half of the tests wait for processes of their own.
PARALLEL ?= -n 4

.PHONY: demo test test-integrations test-frameworks test-lowest test-gpu-kernels check release-check golden clean

demo: $(VENV)/ready
	$(BIN)/gradwire bench train

test: $(VENV)/ready
	$(BIN)/python -m pytest $(PARALLEL) --ignore tests/integrations --ignore tests/frameworks
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(PARALLEL) -rs tests/kernels/gpu

test-integrations: $(VENV)/ready
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pytest tests/integrations -rs

test-frameworks: $(FRAMEWORKS)/ready
	$(FRAMEWORKS)/bin/python -m pytest $(PARALLEL) tests/frameworks -rs

# With the lowest versions that the package says it works with.
test-lowest: $(LOWEST)/ready
	$(LOWEST)/bin/python -m pytest $(PARALLEL) --ignore tests/integrations --ignore tests/frameworks
	TRITON_INTERPRET=1 $(LOWEST)/bin/python -m pytest $(PARALLEL) -rs tests/kernels/gpu

# Of `make test` what is about kernels for GPUs: in Triton's interpreter against the reference, then compiled for GPUs
# that are not here, and launched by a driver that has none.
test-gpu-kernels: $(VENV)/ready
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(PARALLEL) tests/kernels/gpu
	$(BIN)/python -m pytest $(PARALLEL) tests/kernels/gpu

check: $(VENV)/ready
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

release-check: $(VENV)/ready
	.ci/release $(BIN)/python "$(TORCH)"

# Makes the golden vectors of some METHODS anew, or of all: what they wrote, averaged and remembered.
golden: $(VENV)/ready
	PYTHONPATH=tests $(BIN)/python tests/golden.py $(METHODS)

# torch comes first and pinned, so that nothing below picks another build of it.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[bench,dev,gpu]"
	touch $@

# The CPU's build of TensorFlow, which is smaller. Triton is not there: a process ends where both come to it.
$(FRAMEWORKS)/ready: pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --upgrade pip
	$(FRAMEWORKS)/bin/python -m pip install --quiet "$(TORCH)"
	$(FRAMEWORKS)/bin/python -m pip install --quiet "tensorflow-cpu>=2.21" flax --editable ".[bench,dev,keras,jax]"
	touch $@

$(LOWEST)/ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable \
		".[bench,dev,gpu]"
	touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(LOWEST) results .pytest_cache .mypy_cache .ruff_cache
