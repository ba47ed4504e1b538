# make run         sets itself up, runs the main job on the bundled sample, with a page for browsers
# make test        sets itself up, runs the whole test suite
# make check       format, lint, types, import rules; the manual's links and prose; the words of tests and comments
# make trials      killed at every line of a job, and what else takes minutes; .ci/run runs them
# make openvino    the tests of engines, plans, jobs, probation and the store, served by OpenVINO
# make soak        the longer trials (see benchmarks/RESULTS.md); the property tests with examples drawn anew
# make attack      YAML, ONNX, pictures, archives, MQTT, state files, HTTP as strangers send them; SEED=0 MINUTES=5
# make sanitize    kernels.cu on the CPU under ThreadSanitizer and AddressSanitizer (needs g++)
# make gpu-check   on a machine with a GPU: its tests, compute-sanitizer, the benchmark
# make bindings    NVIDIA's Python bindings of TensorRT, for the test that looks up every call; `make test` makes them
# make wheelhouse  what gpu-check needs where there is no network: make wheelhouse PYTHON=3.12
# make generated   the schemas, the man page and the reference in docs/, after a change of a setting, command or document
# make site        the manual as a site in var/site
# make docs        generated, the manual's pictures from real runs (needs mosquitto and Chromium, takes minutes), site
# make lock        pins today's versions of all dependencies, and the hashes of their files

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SAMPLE := var/sample
# For two cores: tests and trials wait for half of their time, for a process, a network or a clock.
WORKERS ?= 6
TRIAL_WORKERS ?= 5
SEED ?= 0
MINUTES ?= 5
# The tests start hundreds of processes: what Python has compiled once and kept, each need not compile again.
unexport PYTHONDONTWRITEBYTECODE
# As in agent/cli/main.py, which the workers of the tests do not go through.
export OPENBLAS_NUM_THREADS := 1
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Each file's hash is in the lock: what an index hands out in its place is refused.
LOCKED := $(PIP) --require-hashes --requirement
# The package itself comes from this folder, and setuptools from the lock.
OURS := $(PIP) --no-deps --no-build-isolation --editable .
COMPILE := uv pip compile --universal --python-version 3.10 --no-header --no-annotate pyproject.toml

.PHONY: run test trials openvino check generated docs site attack soak sanitize lock clean broker rtsp systemd postgres browser promtool fuse bindings wheelhouse gpu-check
.DELETE_ON_ERROR:

run: $(VENV)/.run $(SAMPLE)/street.mp4
	@rm -rf var/state  # every run of the sample starts on a blank board
	@$(BIN)/tared run -c examples/street/config.yaml --web 127.0.0.1:0

test: $(VENV)/.test broker rtsp systemd postgres browser promtool bindings
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 40

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m docs.tools.prose
	@$(BIN)/python -m docs.tools.words
	@$(MAKE) --no-print-directory site

# Strict: a link to nothing, a missing anchor, a page outside the tree is an error.
site: $(VENV)/.test
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(VENV)/.test $(SAMPLE)/street.mp4 broker browser generated
	@$(BIN)/python -m docs.tools.figures
	@$(MAKE) --no-print-directory site

trials: $(VENV)/.test broker postgres browser fuse
	@$(BIN)/python -m pytest -m "trial and not soak" -n $(TRIAL_WORKERS) --dist worksteal --durations 40

openvino: $(VENV)/.test broker
	@TARED_TEST_RUNTIME=openvino $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  $(addprefix tests/,agent/jobs agent/models agent/planning agent/serving agent/validation engines/store system)

attack: $(VENV)/.test
	@PYTHONPATH=tests:tests/support:tests/fakes:. $(BIN)/python -m attack --seed $(SEED) --minutes $(MINUTES)

soak: $(VENV)/.test broker
	$(BIN)/python -m pytest -m soak
	$(BIN)/python -m pytest -m "hypothesis and not soak" --hypothesis-profile anew -n 2

sanitize: $(VENV)/.test
	@$(BIN)/python tests/support/sanitize.py

generated: $(VENV)/.test
	@mkdir -p docs/schemas
	@for name in config model; do $(BIN)/tared config --schema $$name > docs/schemas/$$name.schema.json; done
	@$(BIN)/python tests/support/man_page.py > docs/tared.1
	@$(BIN)/python -m docs.tools.reference

# constraints.txt has the versions alone, for other sets of extras; the locks have the same ones.
lock:
	$(COMPILE) --extra demo --extra fleet --extra test --upgrade -o constraints.txt
	@$(MAKE) --no-print-directory locks/run.txt locks/test.txt locks/openvino.txt locks/jetson.txt --always-make

locks/run.txt: EXTRAS := demo web
locks/test.txt: EXTRAS := demo fleet test
locks/openvino.txt: EXTRAS := openvino web
locks/jetson.txt: EXTRAS := jetson web
locks/%.txt:
	$(COMPILE) $(addprefix --extra ,$(EXTRAS)) --group build --constraint constraints.txt --generate-hashes --upgrade -o $@

# PYTHON is that of the GPU machine: a version, or an interpreter. tests/gpu/wheelhouse.py says what has to be where.
wheelhouse:
	@PYTHONPATH=tests python3 -m gpu.wheelhouse --python $(PYTHON)

gpu-check:
	@PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m gpu.check $(if $(STEPS),--steps $(STEPS))

clean:
	rm -rf $(VENV) var build *.egg-info

# The broker of the tests is mosquitto, the one most boards talk to. Without the right to install it, amqtt serves.
broker:
	@command -v mosquitto >/dev/null || [ -x /usr/sbin/mosquitto ] || \
	  { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y mosquitto mosquitto-clients >/dev/null; } || \
	  echo "mosquitto is not installed and cannot be: the broker tests run on amqtt"

# An RTSP camera for the tests, GStreamer's own server, and the bindings that read its pipelines, for the system's Python.
rtsp:
	@/usr/bin/python3 -c "import gi, gi.overrides, os; gi.require_version('GstRtspServer', '1.0'); os.stat(gi.overrides.__path__[0] + '/Gst.py')" 2>/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends python3-gst-1.0 \
	    gir1.2-gst-rtsp-server-1.0 gstreamer1.0-plugins-base gstreamer1.0-plugins-good gstreamer1.0-plugins-bad \
	    gstreamer1.0-plugins-ugly >/dev/null; } || \
	  echo "GStreamer's RTSP server or its bindings are not installed and cannot be: the tests of RTSP or gst are skipped"

# systemd-analyze judges the unit, and systemd runs it where a test may have namespaces of its own.
systemd:
	@command -v systemd-analyze >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends systemd >/dev/null; } || \
	  echo "systemd is not installed and cannot be: nobody judges systemd/tared.service"

# A real PostgreSQL for the fleet's store; the tests run a private cluster of it, and leave Debian's alone.
postgres:
	@PATH="$$PATH:$$(echo /usr/lib/postgresql/*/bin | tr " " :)"; command -v initdb >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends postgresql >/dev/null; } || \
	  echo "PostgreSQL is not installed and cannot be: the store is tested in SQLite alone"

# A browser for the tests of the pages: Debian's, with its driver.
browser:
	@command -v chromedriver >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null; } || \
	  echo "Chromium is not installed and cannot be: no browser looks at the pages"

# Prometheus's own judge of metrics, rules and their tests; its server is installed beside it, and need not run.
promtool:
	@command -v promtool >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends prometheus >/dev/null; } || \
	  echo "promtool is not installed and cannot be: nobody judges metrics and docs/prometheus"

# A mount that hangs, for the trials; and a compiler, for clocks that jump.
fuse:
	@/usr/bin/python3 -c "import fuse" 2>/dev/null && command -v fusermount3 >/dev/null && command -v cc >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends fuse3 python3-fuse gcc libc6-dev >/dev/null; } || \
	  echo "FUSE or a C compiler is not installed and cannot be: the trials of mounts that hang, or of wrong clocks, are skipped"

# 4 MB from the package index, once. Without it their test is skipped, and the line that says so names the reason.
bindings: $(VENV)/.test
	@$(BIN)/python tests/support/trt_bindings.py

$(SAMPLE)/street.mp4: $(wildcard examples/street/*.py) | $(VENV)/.run
	@$(BIN)/python -m examples.street.render -o $(SAMPLE)

$(VENV)/.run: pyproject.toml locks/run.txt calibrate/count.c
	@[ ! -L $(VENV) ] || { echo "$(VENV) is a link, and setting it up would clear another checkout's: remove the link"; exit 1; }
	@echo "setting up $(VENV), once"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(LOCKED) locks/run.txt
	@$(OURS)
	@touch $@

$(VENV)/.test: $(VENV)/.run locks/test.txt
	@$(LOCKED) locks/test.txt
	@touch $@
