# A target a JSON file: what is there is not measured again until an edit changes. With
# -j, benchmarks boot together and are measured one after another; how many fit depends on
# the GPU's memory (benchmark/README.md).
RELEASED := dist/sglang-0.5.19
PEER := dist/sglang-0.5.20
LAUNCH_BOUND := dist/model-16x2048
GPU_BOUND := dist/model-128x1024
STAGING_SWITCH := SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING
EDITS := $(shell find python/inkling_mtp_staging/srt -name '*.py')

# Neither release starts on the default backend of Hopper.
SIDES_fa4 := --side 0.5.19=$(RELEASED) --side '0.5.19 patched=' --side 0.5.20=$(PEER)
SIDES_default := --side '0.5.19 patched, staging off=,$(STAGING_SWITCH)=0' \
    --side '0.5.19 patched='
RESULTS := $(patsubst %,dist/benchmark-%.json, \
    $(foreach steps,1 3 8,fa4-s$(steps)-cost-patched fa4-s$(steps)-cost-release) \
    default-s3-cost-patched default-s3-cost-switched-off default-s3-cost-long \
    $(foreach steps,3 8,fa4-s$(steps)-launch-bound fa4-s$(steps)-gpu-bound) \
    default-s3-launch-bound default-s3-gpu-bound fa4-s3-serving default-s3-serving)

# Of benchmark-BACKEND-sSTEPS-WHAT.json; $* is BACKEND-sSTEPS.
backend = $(firstword $(subst -, ,$*))
steps = $(patsubst s%,%,$(lastword $(subst -, ,$*)))
measure = $(BIN)/python benchmark/$(1).py --attention-backend $(backend) \
    --steps $(steps) --lock dist/benchmark.lock --out $@.part
whole_engines = $(SIDES_$(backend)) --logs dist/logs/$(basename $(@F))
# A run that is cut short leaves a .part file, which the next run does not take for a result.
keep = mv $@.part $@

.PHONY: benchmark benchmark-ready
.SECONDARY: $(RELEASED) $(PEER) $(LAUNCH_BOUND) $(GPU_BOUND)
benchmark: $(RESULTS)
	$(BIN)/python benchmark/plot.py $(RESULTS) --out dist/benchmark.svg
	$(BIN)/python benchmark/table.py $(RESULTS) | tee dist/benchmark.md

benchmark-ready: gpu
	mkdir -p dist/logs
	$(UV) pip install --quiet --python $(BIN)/python --editable '.[dev,benchmark]'
	$(BIN)/inkling-mtp-staging apply

$(RESULTS): $(EDITS) | benchmark-ready

dist/benchmark-%-cost-patched.json:
	$(call measure,staging_cost)
	$(keep)

dist/benchmark-%-cost-release.json: | $(RELEASED)
	PYTHONPATH=$(abspath $(RELEASED)) $(call measure,staging_cost)
	$(keep)

dist/benchmark-%-cost-switched-off.json:
	$(call measure,staging_cost) --staging 0
	$(keep)

dist/benchmark-%-cost-long.json:
	$(call measure,staging_cost) --batch 8 --seq-len 1024 32768 131072 --repeats 100
	$(keep)

dist/benchmark-%-launch-bound.json: | $(RELEASED) $(PEER) $(LAUNCH_BOUND)
	$(call measure,steady_decode) --model $(LAUNCH_BOUND) --profile-batch 32 $(whole_engines)
	$(keep)

dist/benchmark-%-gpu-bound.json: | $(RELEASED) $(PEER) $(GPU_BOUND)
	$(call measure,steady_decode) --model $(GPU_BOUND) --profile-batch 32 --tokens 256 \
	    --engine-arg=--max-total-tokens --engine-arg=20480 $(whole_engines)
	$(keep)

dist/benchmark-%-serving.json: | $(RELEASED) $(PEER) $(LAUNCH_BOUND)
	$(call measure,serving) --model $(LAUNCH_BOUND) $(whole_engines)
	$(keep)

dist/sglang-%: | benchmark-ready
	rm -rf $@.part
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $@.part sglang==$*
	$(keep)

# model-LAYERSxHIDDEN
dist/model-%: | benchmark-ready
	rm -rf $@.part
	$(BIN)/python -m inkling_mtp_staging.tiny_inkling $@.part \
	    --layers $(firstword $(subst x, ,$*)) --hidden $(lastword $(subst x, ,$*))
	$(keep)
