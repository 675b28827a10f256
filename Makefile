# Heddle. `make help` lists the targets. Everything a target needs is installed by it: Debian packages by
# apt-get (as root), Go modules at the versions go.mod pins, crates at those of rust/Cargo.lock. What is not: Go, gcc,
# make, and rustup with the toolchain of rust/rust-toolchain.toml.

SHELL      := /bin/bash
GO         ?= go
CARGO      ?= cargo
BIN        := bin
OUT        := out
PROGRAMS   := heddle heddled heddle-runtime heddle-cni heddle-netstack
# On nodes of Kubernetes: docs/howto/kubernetes.md.
KUBERNETES_PROGRAMS := heddle-kube
export CGO_ENABLED ?= 0
# The same flags in every call, so that what `make check` compiles is not compiled again for programs and tests.
export GOFLAGS := $(strip $(filter-out -trimpath,$(shell $(GO) env GOFLAGS)) -trimpath)

# What each job needs beyond Go and gcc.
CLIB_PACKAGES  := clang binutils linux-libc-dev libc6-dev libibverbs-dev librdmacm-dev libbpf-dev
LAB_PACKAGES   := runc iproute2 nftables util-linux procps
BENCH_PACKAGES := iperf3
UDP_PACKAGES   := dnsperf unbound ngtcp2-client ngtcp2-server
PAPER_PACKAGES := iperf3 memcached nginx-light postgresql default-jre-headless
TEST_PACKAGES  := nginx-light curl wrk redis-server redis-tools memcached etcd-server python3-minimal python3 \
                  default-jdk-headless iputils-ping tcpdump openssl libc6-dev strace traceroute bind9-dnsutils dnsmasq-base openmpi-bin \
                  libpython3.11-testsuite containernetworking-plugins systemd net-tools lsof psmisc prometheus musl-tools $(UDP_PACKAGES) $(VERBS_PACKAGES)
# Programs of others that use verbs, and the library that ours stands in for.
VERBS_PACKAGES := libibverbs1 ibverbs-utils perftest rdmacm-utils ucx-utils iperf netpipe-tcp netcat-traditional wget curl
CONFORMANCE_PACKAGES := libpython3.11-testsuite python3 gcc libc6-dev openssl stress-ng
# Container engines that the tests start themselves, and what their containers have in them.
ENGINE_PACKAGES := docker.io docker-compose iptables podman containerd containernetworking-plugins busybox-static
# Emulated machines (test/machine).
MACHINE_PACKAGES := qemu-system-x86 busybox-static cpio xz-utils zstd kmod dash
DEB_PACKAGES := dpkg dpkg-dev xz-utils gzip git $(CLIB_PACKAGES)
CHECK_PACKAGES := clang clang-format llvm libbpf-dev linux-libc-dev bindgen

APT_LOCK := /run/heddle-apt.lock

# install PACKAGES: only what is missing, so that a second run needs no network. Servers among them are not
# started: the tests run their own. Makes in two trees at once take turns: apt's lock of its lists is waited for by nobody.
define install
	@missing=$$(for p in $(1); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
		echo "installing:" $$missing; \
		[ "$$(id -u)" = 0 ] || { echo "needs root to install:" $$missing; exit 1; }; \
		exec 9>$(APT_LOCK); flock 9; \
		policy=/usr/sbin/policy-rc.d; \
		[ -e $$policy ] || { trap 'rm -f /usr/sbin/policy-rc.d' EXIT; printf '#!/bin/sh\nexit 101\n' >$$policy; chmod 755 $$policy; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 $$missing 9>&- >/dev/null; \
	fi
endef

.PHONY: help build docs deb image k8s test-k8s test-docs attack demo test test-lsm test-upgrade test-nodes soak chaos chaos-store check check-bpf generate bench bench-check bench-core bench-cost bench-density bench-paper bench-peers bench-packets kafka conformance clean lab-packages bench-packages test-packages check-packages \
	conformance-packages need-root

help:
	@echo "make build   programs into $(BIN)/"
	@echo "make deb     the Debian package into $(OUT)/deb/, with version $$VERSION or the commit's; reproducible"
	@echo "make deb-arm64, make image-arm64  those for arm64, on an amd64 machine"
	@echo "make image   the container image for Kubernetes into $(OUT)/image/, with tag $$VERSION or the commit's"
	@echo "make attack  the same into $(BIN)/attack/, for the attack suite: these can do without protections. Not for use"
	@echo "make bench-pool  new connections with the preloaded pool of sockets, into docs/benchmarks/ (root; 4 minutes)"
	@echo "make bench-stacks  each stack that a profile can choose, between nodes and over a line with losses, into docs/benchmarks/; wants a quiet machine (root; 6 minutes)"
	@echo "make bench-rdma  RDMA without a card by perftest, NetPIPE and MPI, with processor time, beside TCP and a copy, into docs/benchmarks/; wants a quiet machine (root; 8 minutes)"
	@echo "make demo    two nodes on this machine, the main job in three modes, a table and a plot (root)"
	@echo "make test    every test, without and with root (root)"
	@echo "make test-ui  the page of 'heddle ui' in Debian's Chromium, which it installs (root; a minute)"
	@echo "make test-lsm  the second lock, on security hooks, and what the verifier of Debian's kernel says of all BPF programs, in emulated machines (root)"
	@echo "make test-nerdctl  containers of nerdctl, which is built first (root; a minute, and some for the build)"
	@echo "make test-rdma-card  RDMA with a card, emulated, in two emulated machines (root)"
	@echo "make test-arm64  the BPF programs on Debian's kernel for arm64, in an emulated machine (root)"
	@echo "make test-arm64-lab  the core scenarios there, with the package for arm64 on Debian's programs for arm64 (root; half an hour)"
	@echo "make test-arm64-package  that package installed, upgraded and removed there, without systemd (root; a quarter of an hour)"
	@echo "make test-encrypt  nodes that encrypt what they send each other, on Debian's kernel in an emulated machine (root; 10 minutes)"
	@echo "make test-underlay-devices  VLANs and bonds between nodes, on Debian's kernel in an emulated machine (root; 10 minutes)"
	@echo "make test-vm  TCP of an emulated machine without a network device, by queues in shared memory (root; a minute)"
	@echo "make test-kernels  the core scenarios in emulated machines with Debian's kernels (root; a quarter of an hour each)"
	@echo "make test-k8s  against a real Kubernetes, which it builds into $(OUT)/k8s/ (root; the first time 10 to 20 minutes)"
	@echo "make test-docs  what the pages of docs/howto have their readers type, all of it, on hosts made for it (root; some minutes)"
	@echo "make test-upgrade  agents replaced by these under load, from a build of commit REV (root)"
	@echo "make test-nodes  an etcd cluster's and nodes' ends, for minutes; an etcd restored from a snapshot (root)"
	@echo "make test-attack, test-bench, test-engines, test-lifecycle, test-paths, test-policy, test-programs, test-sockets, test-stacks, test-underlays, test-underlay6  scenarios of a theme (root)"
	@echo "make test-lab, test-unit, test-suites, test-rust  all scenarios; packages; suites of others; Rust. RUN=^TestPaths for some of a part"
	@echo "make soak    random socket programs in overlay and heddle mode, for SOAK=10m; STACK=netstack for those on a stack module (root)"
	@echo "make chaos   agents, fd keepers, runtimes and plugins killed under load, for CHAOS=5m; SEED to repeat (root)"
	@echo "make chaos-store  the same on a store of three etcd members, which are killed, too (root)"
	@echo "make test-rust  the Rust workspace's tests, and models of its memory orders; part of make test"
	@echo "make bench-rust  nanoseconds for a slot of a ring in shared memory, what a stack module moves; wants a quiet machine (root; a minute)"
	@echo "make check   format, vet, lint, generated files up to date, crates as reviewed"
	@echo "make bench   the full benchmark, results and plot into $(OUT)/ (root)"
	@echo "make bench-check  ratios to host beside the committed ones; wants a quiet machine (root; 2 minutes)"
	@echo "make bench-core  what 'make bench' measures, and new connections by 1, 8 and 64 callers, into docs/benchmarks/ (root; 8 minutes)"
	@echo "make bench-cost  what Heddle costs a packet, a connection, a system call and a container's start, into docs/benchmarks/ (root; 3 minutes)"
	@echo "make bench-paper  the Slim paper's evaluation: applications in three modes, into docs/benchmarks/ (root; 15 minutes); WORKLOADS, ROUNDS"
	@echo "make bench-peers  against Docker's networks and a BPF data path, into docs/benchmarks/ (root; 4 minutes)"
	@echo "make bench-packets  UDP, QUIC and DNS against the same, into docs/benchmarks/; wants a quiet machine (root; 10 minutes)"
	@echo "make bench-density  a node with up to 1,000 containers and 100,000 live connections, into docs/benchmarks/ (root; 4 minutes)"
	@echo "make bench-summary  the page of results and its tables, from the committed results"
	@echo "make docs    docs/ as a site with search into $(OUT)/site/; links are checked"
	@echo "make kafka   Kafka's jars into $(OUT)/kafka/, for make bench-paper"
	@echo "make conformance  suites of others in both modes into docs/conformance.md (root); SUITE=cpython|go|stress-ng for one"
	@echo "make clean   remove what was built, and the lab if one is up"

CONGESTION := $(BIN)/dctcp.bpf.o $(BIN)/ledbat.bpf.o
build: $(BIN)/libheddle-guest.so $(BIN)/libheddle-machine.so $(BIN)/libheddle-pool.so $(BIN)/libheddle-verbs.so $(CONGESTION) rust
	@mkdir -p $(BIN)
	$(GO) build -trimpath -o $(BIN)/ $(addprefix ./cmd/,$(PROGRAMS) $(KUBERNETES_PROGRAMS))

# The Rust workspace: heddle-rdma, the router of the verbs plane, heddle-stack, the module host, heddle-machine, TCP of virtual machines, and their libraries. What cargo makes goes to out/rust
# (rust/.cargo/config.toml). Once its crates are there, cargo needs no network.
.PHONY: rust need-cargo test-rust bench-rust
rust: need-cargo
	cd rust && $(CARGO) build --release --locked --quiet
	@mkdir -p $(BIN)
	@flock $(OUT)/install.lock install $(OUT)/rust/release/heddle-rdma $(OUT)/rust/release/heddle-stack $(OUT)/rust/release/heddle-machine $(BIN)/ # two at once: "File exists"

need-cargo:
	@command -v $(CARGO) >/dev/null || { echo "needs cargo: install rustup, then run 'rustup toolchain install' in rust/"; exit 1; }
	@cd rust && $(CARGO) --version >/dev/null || { echo "needs the toolchain of rust/rust-toolchain.toml: run 'rustup toolchain install' in rust/"; exit 1; }

# Units, hostile peers, two processes, routers; what heddle-stack has to do of heddle-netstack, too; attacks on a router without a protection; then loom's models, which are shared-ring compiled in another way.
# What fails is tried once more, as Go's tests are (below, at `test`): the summary names it as a fault. Cargo warns of a
# jobserver that make names and has not given it.
twice = cd rust && unset MAKEFLAGS && { $(1) || { echo "FAULT: rust: needed a second try: $(strip $(2))" | tee -a $(abspath $(OUT))/rust.faults; $(1); }; }
test-rust: need-cargo
	@mkdir -p $(OUT) && rm -f $(OUT)/rust.faults
	$(call twice,$(CARGO) test --locked --quiet,the workspace)
	CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/ ./cmd/heddle-netstack
	$(call twice,HEDDLE_TEST_MODULE=$(abspath $(BIN))/heddle-netstack $(CARGO) test --locked --quiet -p heddle-stack $(addprefix --test ,two_modules hostile isolation kernel_peer) -- --test-threads=1,heddle-netstack)
	$(call twice,$(CARGO) test --locked --quiet -p heddle-rdma --features attack $(addprefix --test ,attacks changes groups hostile_card kept sandbox shares slow_pages) --target-dir ../$(OUT)/rust/attack,attacks on heddle-rdma)
	$(call twice,$(CARGO) test --locked --quiet -p heddle-stack --features attack --test attacks --target-dir ../$(OUT)/rust/attack,attacks on heddle-stack)
	$(call twice,$(CARGO) test --locked --quiet -p heddle-machine --features attack --test attacks --target-dir ../$(OUT)/rust/attack,attacks on heddle-machine)
	$(call twice,RUSTFLAGS="--cfg loom" $(CARGO) test --locked --quiet --lib -p shared-ring --target-dir ../$(OUT)/rust/loom,loom)

bench-rust: need-cargo
	cd rust && $(CARGO) bench --locked --quiet

# What heddle-runtime preloads in containers that ask for it (docs/howto/many-connections.md).
$(BIN)/libheddle-pool.so: clib/pool/pool.c clib/trap/call.h clib/build.sh
	$(call install,$(CLIB_PACKAGES))
	@GO=$(GO) clib/build.sh pool $@

# What has connections within a node go through memory (docs/howto/stacks.md).
$(BIN)/libheddle-guest.so: $(wildcard clib/guest/*.[ch] clib/ring/*.h clib/trap/*.h) clib/build.sh
	$(call install,$(CLIB_PACKAGES))
	@GO=$(GO) clib/build.sh guest $@

# What programs of a virtual machine without a network device preload (docs/howto/machines.md).
$(BIN)/libheddle-machine.so: $(wildcard clib/machine/*.[ch]) clib/stack/queues.h clib/build.sh
	$(call install,$(CLIB_PACKAGES))
	@GO=$(GO) clib/build.sh machine $@

# What stands in for libibverbs.so.1 in containers that have verbs (docs/howto/rdma.md).
$(BIN)/libheddle-verbs.so: $(wildcard clib/verbs/*.[ch] clib/ring/*.h) clib/verbs/symbols.map clib/build.sh
	$(call install,$(CLIB_PACKAGES))
	@GO=$(GO) clib/build.sh verbs $@

# Congestion controls for `heddle stack load` (docs/howto/own-stacks.md).
$(CONGESTION): $(BIN)/%.bpf.o: bpf/cc/%.bpf.c bpf/cc/tcp.h packaging/build-congestion.sh
	$(call install,$(CLIB_PACKAGES))
	@packaging/build-congestion.sh $* $@

# docs/howto/install-debian.md. The same commit and VERSION give the same bytes.
deb: need-cargo
	$(call install,$(DEB_PACKAGES))
	@mkdir -p $(OUT)/deb
	@GO=$(GO) CARGO=$(CARGO) packaging/build-deb.sh $(OUT)/deb $(PROGRAMS) $(KUBERNETES_PROGRAMS)

# Those for arm64, made on amd64: with compilers, a linker and a C library's headers for it.
.PHONY: cross-arm64 deb-arm64 image-arm64
cross-arm64: need-cargo
	$(call install,$(DEB_PACKAGES) gcc-aarch64-linux-gnu libc6-dev-arm64-cross lld)
	cd rust && rustup target add aarch64-unknown-linux-gnu
image-arm64: cross-arm64
	@mkdir -p $(OUT)/image
	@ARCH=arm64 GO=$(GO) CARGO=$(CARGO) packaging/build-image.sh $(OUT)/image $(PROGRAMS) $(KUBERNETES_PROGRAMS)
deb-arm64: cross-arm64
	@mkdir -p $(OUT)/deb
	@ARCH=arm64 GO=$(GO) CARGO=$(CARGO) packaging/build-deb.sh $(OUT)/deb $(PROGRAMS) $(KUBERNETES_PROGRAMS)

# docs/howto/install-on-kubernetes.md: a tar file for `ctr images import`, `docker load` or `podman load`.
image: need-cargo
	$(call install,$(CLIB_PACKAGES))
	@mkdir -p $(OUT)/image
	@GO=$(GO) CARGO=$(CARGO) packaging/build-image.sh $(OUT)/image $(PROGRAMS) $(KUBERNETES_PROGRAMS)

# Programs that do without the protections named in HEDDLE_WITHOUT: docs/howto/attack-suite.md.
attack: $(BIN)/libheddle-guest.so $(BIN)/libheddle-pool.so
	@mkdir -p $(BIN)/attack
	@cp $(BIN)/libheddle-guest.so $(BIN)/libheddle-pool.so $(BIN)/attack/
	$(GO) build -trimpath -tags attack -o $(BIN)/attack/ $(addprefix ./cmd/,$(PROGRAMS))

# docs/benchmarks/method.md, "With a pool".
.PHONY: bench-pool
bench-pool: need-root build lab-packages
	$(call install,gcc libc6-dev)
	$(BIN)/heddle bench pool --up --lab poolbench --json docs/benchmarks/pool.json
	$(BIN)/heddle bench pool report
	$(BIN)/heddle bench summary

# docs/benchmarks/method.md, "RDMA".
.PHONY: bench-rdma
bench-rdma: need-root build bench-packages
	$(call install,perftest rdmacm-utils netpipe-tcp openmpi-bin python3-numpy python3-mpi4py libopenblas0-pthread)
	$(BIN)/heddle bench rdma --up --lab rdmabench --json docs/benchmarks/$(@:bench-%=%).json
	$(BIN)/heddle bench rdma report
	$(BIN)/heddle bench summary

# docs/benchmarks/method.md, "Stacks".
.PHONY: bench-stacks
bench-stacks: need-root build bench-packages
	$(call install,redis-server redis-tools)
	$(BIN)/heddle bench stacks --up --lab stackbench --json docs/benchmarks/$(@:bench-%=%).json
	$(BIN)/heddle bench stacks report
	$(BIN)/heddle bench summary

need-root:
	@[ "$$(id -u)" = 0 ] || { echo "this target needs root: it makes network namespaces and loads BPF programs"; exit 1; }

lab-packages:
	$(call install,$(LAB_PACKAGES))
bench-packages: lab-packages
	$(call install,$(BENCH_PACKAGES))
test-packages: bench-packages
	$(call install,$(TEST_PACKAGES) $(ENGINE_PACKAGES))
check-packages:
	$(call install,$(CHECK_PACKAGES))
conformance-packages: lab-packages
	$(call install,$(CONFORMANCE_PACKAGES))

demo: need-root build bench-packages
	@mkdir -p $(OUT)
	$(BIN)/heddle demo --lab demo --plot $(OUT)/demo.svg

bench: need-root build bench-packages
	@mkdir -p $(OUT)
	$(BIN)/heddle bench --up --lab bench --json $(OUT)/bench.json --plot $(OUT)/bench.svg

# docs/benchmarks/method.md, "Has it become slower?". No part of `make test`: it measures, and judges nothing.
bench-check: need-root build bench-packages
	$(BIN)/heddle bench --up --lab check --modes host,heddle --duration 1s --against docs/benchmarks/core.json

# docs/benchmarks/tables.md, "Core" and "New connections by several callers".
bench-core: need-root build bench-packages
	$(BIN)/heddle bench --up --lab core --json docs/benchmarks/core.json --plot docs/benchmarks/core.svg
	$(BIN)/heddle bench --up --lab core --workloads crr,crr8,crr64 --modes host,overlay,heddle,bare,floor --duration 1s --json docs/benchmarks/callers.json
	$(BIN)/heddle bench report
	$(BIN)/heddle bench summary

# The page of results and all tables, from the committed files alone.
.PHONY: bench-summary
bench-summary: build
	for r in "" cost paper peers packets density pool rdma stacks; do $(BIN)/heddle bench $$r report || exit 1; done
	$(BIN)/heddle bench summary

# docs/benchmarks/method.md, "What Heddle adds".
bench-cost: need-root build bench-packages
	$(BIN)/heddle bench cost --up --lab cost --json docs/benchmarks/cost.json
	$(BIN)/heddle bench cost report
	$(BIN)/heddle bench summary

# docs/benchmarks/method.md, "The paper's applications". Results of other workloads than WORKLOADS are kept.
WORKLOADS :=
ROUNDS    := 3
bench-paper: need-root build lab-packages
	$(call install,$(PAPER_PACKAGES))
	$(BIN)/heddle bench paper --up --lab paper --workloads "$(WORKLOADS)" --rounds $(ROUNDS) --kafka $(OUT)/kafka --merge --json docs/benchmarks/paper.json
	$(BIN)/heddle bench paper report
	$(BIN)/heddle bench summary

# docs/benchmarks/method.md, "Networks of others": Docker's networks and a BPF data path in the same run. 7 minutes.
bench-peers: need-root build bench-packages
	$(call install,docker.io iptables)
	$(BIN)/heddle bench peers --up --lab peers --runs 8 --json docs/benchmarks/peers.json
	$(BIN)/heddle bench peers report
	$(BIN)/heddle bench summary

# docs/benchmarks/method.md, "UDP, QUIC and DNS".
bench-packets: need-root build bench-packages
	$(call install,docker.io iptables $(UDP_PACKAGES))
	$(BIN)/heddle bench packets --up --lab packets --json docs/benchmarks/packets.json
	$(BIN)/heddle bench packets report
	$(BIN)/heddle bench summary

# docs/benchmarks/method.md, "A node with many containers".
bench-density: need-root build lab-packages
	$(BIN)/heddle bench density --lab density --json docs/benchmarks/density.json
	$(BIN)/heddle bench density report
	$(BIN)/heddle bench summary

# Kafka's jars at the versions of test/kafka/pom.xml, and with the contents of jars.sha256.
kafka: $(OUT)/kafka/.checked
$(OUT)/kafka/.checked: test/kafka/pom.xml test/kafka/jars.sha256
	$(call install,maven default-jre-headless)
	rm -rf $(OUT)/kafka && mkdir -p $(OUT)/kafka
	mvn -q -B -f test/kafka/pom.xml dependency:copy-dependencies -DoutputDirectory=$(abspath $(OUT)/kafka)
	cd $(OUT)/kafka && sha256sum --quiet -c $(abspath test/kafka/jars.sha256) && touch .checked

# docs/ as a static site. Links that lead nowhere end it, and so does a page that fetches something
# from another host when it is read. MkDocs is installed with what it needs, at the versions and
# hashes of docs/requirements.txt, into a place of its own.
DOCS_VENV := $(OUT)/docs-venv
docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/mkdocs build --quiet --strict --site-dir $(abspath $(OUT)/site)
	@! grep -rnoE '<(script|link|img|iframe|source|object)[^>]+(src|href|data)="?(https?:)?//[^" >]+|(url\(|@import)[ "'"'"']*(https?:)?//[^)"]*' \
		$(OUT)/site --include=*.html --include=*.css || { echo "these would be fetched from another host"; exit 1; }
	@echo "the site: $(OUT)/site/index.html"
$(DOCS_VENV)/.installed: docs/requirements.txt
	@python3 -c 'import venv, ensurepip' 2>/dev/null || $(MAKE) --no-print-directory docs-packages
	rm -rf $(DOCS_VENV) && python3 -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r docs/requirements.txt
	@touch $@
.PHONY: docs-packages
docs-packages:
	$(call install,python3 python3-venv)

# Test suites of others in both modes of a container; docs/conformance.md says how to read the result.
conformance: need-root build conformance-packages
	$(GO) run ./test/conformance -bin $(BIN) -suite "$(SUITE)" -docs docs/conformance.md

# Two shards side by side. The first has the scenarios: a package for each of THEMES, two at a time, each in a lab of its own
# (test/lab). The second has the Rust workspace's tests, the packages' own and then other people's suites. The machine has few
# cores, but most scenarios wait for something more than half of their time. The themes that take longest come first, so that
# none is left over at the end; packages of the second shard that are next are compiled meanwhile, those that take longest to
# compile at the end.
# The race detector needs cgo. A test that fails is tried once more, scenarios in a new lab, because the second try says more about
# why; but a test that needed it is a fault all the same, and the summary names it. Then the slowest are named.
# A package that fails outside its tests is tried again with none of them, which is no success either. While all this runs,
# test/summary says once a minute how far it is, and what is left by the record of an earlier run (test/summary/record).
# A program with the race detector sleeps for a second before it ends, and many tests run themselves as other programs:
# 20 ms are enough for reports of the last moment.
# The time after which go test kills a package counts from before it waits for the lock, that is for another package.
# A theme has more than it ever took (30 minutes, at load 60) and ends, if it hangs, before CI does: the summary says which.
RETRY  := --rerun-fails=1 --rerun-fails-max-failures=10
THEMES := programs paths lifecycle stacks attack sockets engines policy underlays bench underlay6
PARTS  := lab unit suites
# RUN, if given, says which tests: test-lab RUN=^TestPaths. A package without any of them brings no lab up.
RUN    :=
SCENARIOS = HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) tool gotestsum --format testname --hide-summary=output $(RETRY) --jsonfile $(OUT)/$(1).json \
	--packages "$(2)" -- -count=1 -vet=off -p 2 -parallel=8 -timeout 50m '-run=$(RUN)'
test: need-root build attack test-packages
	@mkdir -p $(OUT) && rm -f $(PARTS:%=$(OUT)/%.json) $(OUT)/rust.faults && $(GO) build -o $(OUT)/summary ./test/summary
	@$(OUT)/summary -every 1m $(OUT) & progress=$$!; \
	$(MAKE) --no-print-directory --jobs=2 --keep-going test-shard-1 test-shard-2; code=$$?; kill $$progress; \
	$(MAKE) --no-print-directory test-summary && exit $$code

# Parts of `make test` by themselves.
TEST_PARTS := lab unit suites $(THEMES)
.PHONY: $(TEST_PARTS:%=test-%)
$(TEST_PARTS:%=test-%): need-root build attack test-packages
	@mkdir -p $(OUT)
	$(MAKE) --no-print-directory part-$(@:test-%=%)

# They find the programs built.
.PHONY: test-shard-1 test-shard-2 test-summary $(TEST_PARTS:%=part-%)
test-summary:
	@echo "slowest tests:"; for f in $(PARTS); do $(GO) tool gotestsum tool slowest --num 12 --threshold 3s --jsonfile $(OUT)/$$f.json; done; cat $(OUT)/rust.faults 2>/dev/null; $(OUT)/summary $(OUT)
test-shard-1: part-lab
test-shard-2:
	code=0; for part in test-rust part-unit part-suites; do $(MAKE) --no-print-directory $$part || code=1; done; exit $$code
part-lab:
	$(call SCENARIOS,lab,$(THEMES:%=./test/%))
$(THEMES:%=part-%):
	$(call SCENARIOS,$(@:part-%=%),./test/$(@:part-%=%))
part-unit:
	HEDDLE_BIN=$(CURDIR)/$(BIN) GORACE=atexit_sleep_ms=20 CGO_ENABLED=1 $(GO) tool gotestsum --format pkgname-and-test-fails --hide-summary=output --jsonfile $(OUT)/unit.json $(RETRY) \
		--packages ". ./clib/... ./internal/... ./cmd/..." -- -race -vet=off -p 2 -exec "flock -o $(CURDIR)/$(OUT)/unit.lock" -timeout 40m '-run=$(RUN)'
part-suites:
	HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) tool gotestsum --format testname --hide-summary=output --jsonfile $(OUT)/suites.json $(RETRY) \
		--packages "./test/conformance ./test/k8s ./test/pages ./test/summary" -- -count=1 -vet=off -p 1 -timeout 20m '-run=$(RUN)'

# What needs a kernel that few machines have runs in emulated ones, on Debian's (test/machine): a download of 70 MB, once.
.PHONY: machine test-rdma-card
machine:
	$(call install,$(MACHINE_PACKAGES))
	@mkdir -p $(OUT)/kernel
	@[ -n "$$(ls $(OUT)/kernel/linux-image-*.deb 2>/dev/null)" ] || { flock $(APT_LOCK) apt-get update -qq && cd $(OUT)/kernel && apt-get download -qq \
		"$$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)"; }

# The second lock, on security hooks, and what Debian's verifier says of all programs. Some minute.
test-lsm: need-root machine
	HEDDLE_KERNEL=$$(ls -d $(CURDIR)/$(OUT)/kernel/linux-image-*.deb) $(GO) test ./test/kernels -run 'TestLSM|TestVerifierWork' -count=1 -v -timeout 15m

# The BPF programs on Debian's kernel for arm64: its verifier takes them, and the datapath's tests pass there.
ARM64 := $(OUT)/arm64
ARM64_MACHINE = HEDDLE_KERNEL=$$(ls -d $(CURDIR)/$(ARM64)/linux-image-*.deb) HEDDLE_BUSYBOX=$$(ls -d $(CURDIR)/$(ARM64)/busybox-static_*.deb)
.PHONY: arm64 arm64-root test-arm64 test-arm64-lab test-arm64-package
test-arm64: need-root arm64
	$(ARM64_MACHINE) $(GO) test ./test/kernels -run TestARM64 -count=1 -v -timeout 70m

# The package for arm64, and in a machine of Debian's packages for arm64 the scenarios of test-kernels with its programs.
ARM64_PACKAGES := $(LAB_PACKAGES) bash dash coreutils findutils grep sed mawk gzip tar mount kmod libc-bin hostname python3 gcc libc6-dev iputils-ping iputils-tracepath tcpdump dpkg diffutils perl-base init-system-helpers
arm64-root: need-root arm64 deb-arm64
	test/machine/debian.sh $(ARM64) arm64 $(ARM64_PACKAGES)
test-arm64-package: arm64-root
	$(ARM64_MACHINE) HEDDLE_ROOT=$(CURDIR)/$(ARM64)/root HEDDLE_DEB=$$(ls -t $(CURDIR)/$(OUT)/deb/heddle_*_arm64.deb | head -1) \
		$(GO) test ./test/kernels -run TestPackageARM64 -count=1 -v -timeout 90m
test-arm64-lab: arm64-root
	dpkg-deb --fsys-tarfile $$(ls -t $(OUT)/deb/heddle_*_arm64.deb | head -1) | tar -x --keep-directory-symlink -C $(ARM64)/root
	@mkdir -p $(ARM64)/root/heddle/bin && cp -r test $(ARM64)/root/heddle/
	@cd $(ARM64)/root && cp usr/bin/heddle* usr/sbin/heddle* usr/lib/cni/heddle-cni usr/lib/heddle/*heddle* usr/lib/heddle/congestion/* heddle/bin/
	$(ARM64_MACHINE) HEDDLE_ROOT=$(CURDIR)/$(ARM64)/root $(GO) test ./test/kernels -run TestLabARM64 -count=1 -v -timeout 3h
arm64: machine
	$(call install,qemu-system-arm)
	test/machine/debian.sh $(ARM64) arm64
	@[ -n "$$(ls $(ARM64)/linux-image-*.deb 2>/dev/null)" ] || { export APT_CONFIG=$(CURDIR)/$(ARM64)/apt.conf; cd $(ARM64) && apt-get download -qq busybox-static \
		"$$(apt-cache depends linux-image-arm64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)"; }

# WireGuard between the nodes of a lab. Some ten minutes.
.PHONY: test-encrypt
test-encrypt: need-root machine build lab-packages
	$(call install,python3 wireguard-tools)
	@mkdir -p $(OUT)
	HEDDLE_KERNEL=$$(ls -d $(CURDIR)/$(OUT)/kernel/linux-image-*.deb) $(GO) test ./test/kernels -run TestEncrypt -count=1 -v -timeout 70m

# VLANs and bonds between the nodes of a lab. Some ten minutes.
.PHONY: test-underlay-devices
test-underlay-devices: need-root machine build lab-packages
	$(call install,python3 iputils-ping)
	@mkdir -p $(OUT)
	HEDDLE_KERNEL=$$(ls -d $(CURDIR)/$(OUT)/kernel/linux-image-*.deb) $(GO) test ./test/kernels -run TestUnderlayDevices -count=1 -v -timeout 70m

# RDMA with a card, which is rdma_rxe in two emulated machines. 4 minutes, 10 on a busy machine.
test-rdma-card: need-root machine build
	$(call install,$(VERBS_PACKAGES) ibverbs-providers iproute2)
	cd rust && $(CARGO) build --release --locked --quiet -p heddle-rdma --example agent --example hostile
	cd rust && $(CARGO) build --release --locked --quiet -p heddle-rdma --features attack --target-dir ../$(OUT)/rust/attack
	@mkdir -p $(OUT)/card && install $(OUT)/rust/release/examples/{agent,hostile} $(OUT)/rust/attack/release/heddle-rdma $(OUT)/card/
	HEDDLE_KERNEL=$$(ls -d $(CURDIR)/$(OUT)/kernel/linux-image-*.deb) HEDDLE_BIN=$(CURDIR)/$(BIN) HEDDLE_CARD=$(CURDIR)/$(OUT)/card \
		$(GO) test ./test/card -count=1 -v -timeout 15m

# Containers of nerdctl, which Debian has not: built of its module, with what that pins. Some minutes the first time.
.PHONY: test-nerdctl
NERDCTL := github.com/containerd/nerdctl/v2@v2.1.2
$(OUT)/nerdctl:
	@mkdir -p $(OUT)
	cd "$$($(GO) mod download -json $(NERDCTL) | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')" && $(GO) build -o $(CURDIR)/$@ ./cmd/nerdctl
test-nerdctl: need-root build lab-packages $(OUT)/nerdctl
	$(call install,$(ENGINE_PACKAGES) $(VERBS_PACKAGES))
	HEDDLE_NERDCTL=$(CURDIR)/$(OUT)/nerdctl HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) test ./test/engines -run TestNerdctl -count=1 -v -timeout 5m

# A virtual machine without a network device, in a container of a lab. Some 40 seconds.
.PHONY: test-vm
test-vm: need-root machine build lab-packages
	$(call install,python3)
	HEDDLE_KERNEL=$$(ls -d $(CURDIR)/$(OUT)/kernel/linux-image-*.deb) HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) test ./test/vm -count=1 -v -timeout 15m

# A browser in front of the page of `heddle ui`: 124 MB of packages. PICTURES=1 makes those of docs/ anew.
.PHONY: test-ui
test-ui: need-root build test-packages
	$(call install,chromium chromium-driver)
	HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) test ./test/ui -count=1 -v -timeout 10m $(if $(PICTURES),-pictures $(CURDIR)/docs/howto/pictures)

# The core scenarios on Debian's kernels: 6.1, and the newest that is to be had (docs/kernels.md). A quarter of an hour a kernel.
KERNELS := linux-image-amd64 linux-image-6.12-amd64
.PHONY: test-kernels
test-kernels: need-root build test-packages machine
	@mkdir -p $(OUT)/kernels && cd $(OUT)/kernels && for meta in $(KERNELS); do \
		package=$$(apt-cache depends $$meta | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1); \
		[ -n "$$package" ] || { echo "the package archive has no $$meta: KERNELS names others"; exit 1; }; \
		[ -n "$$(ls $${package}_*.deb 2>/dev/null)" ] || apt-get download -qq $$package; \
	done
	HEDDLE_KERNELS="$$(ls -d $(CURDIR)/$(OUT)/kernels/linux-image-*.deb)" $(GO) test ./test/kernels -run TestKernels -count=1 -v -timeout 3h

# Kubernetes, built from its modules: test/k8s/build/go.mod has the version. What is built is kept.
K8S_PROGRAMS := kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl
K8S_PACKAGES := etcd-server containerd runc iproute2 nftables iptables util-linux busybox-static containernetworking-plugins perftest
k8s: $(addprefix $(OUT)/k8s/,$(K8S_PROGRAMS))
$(OUT)/k8s/%: test/k8s/build/go.mod
	@mkdir -p $(OUT)/k8s
	cd test/k8s/build && $(GO) build -trimpath -ldflags "-s -w" -o $(abspath $@) k8s.io/kubernetes/cmd/$*

test-k8s: need-root build k8s image
	$(call install,$(K8S_PACKAGES))
	HEDDLE_BIN=$(CURDIR)/$(BIN) HEDDLE_K8S_BIN=$(abspath $(OUT)/k8s) HEDDLE_IMAGE=$$(ls -t $(CURDIR)/$(OUT)/image/*.tar | head -1) \
		$(GO) test ./test/k8s -count=1 -timeout 20m -v

# The pages of docs/howto, typed as they stand there. `make test` has those that take seconds.
test-docs: need-root build attack test-packages
	$(call install,etcd-client jq $(DEB_PACKAGES))
	@$(GO) list -deps -tags man $(addprefix ./cmd/,$(PROGRAMS)) >/dev/null # modules of `make deb`, for hosts without a network
	HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) test ./test/pages -count=1 -timeout 40m -v -pages.all

# The upgrade from a real earlier build, of commit REV: docs/howto/install-debian.md. `make test` has one from the same
# source, because a checkout may have no history.
test-upgrade: need-root build test-packages
	@[ -n "$(REV)" ] || { echo "give the commit of the previous build: make test-upgrade REV=COMMIT"; exit 1; }
	rm -rf $(OUT)/previous && mkdir -p $(OUT)/previous/source $(OUT)/previous/bin
	git archive $(REV) | tar -x -C $(OUT)/previous/source
	cd $(OUT)/previous/source && $(GO) build -trimpath -ldflags "-X heddle.dev/heddle/internal/version.release=$(REV)" -o ../bin/ $(addprefix ./cmd/,heddle heddled heddle-runtime)
	HEDDLE_BIN=$(CURDIR)/$(BIN) HEDDLE_PREVIOUS_BIN=$(CURDIR)/$(OUT)/previous/bin $(GO) test ./test/lifecycle -count=1 -run '^TestUpgrade$$' -v

# What takes minutes because leases and ages have to run out. `make test` has the rest.
test-nodes: need-root build test-packages
	$(call install,etcd-client)
	HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) test ./test/lifecycle -count=1 -timeout 20m -run '^(TestEightNodes|TestNodesComeAndGo|TestStoreCluster.*|TestStoreSnapshot)$$' -v -nodes.long

# Random seeds, for SOAK. A finding is printed as a shrunk program and kept in out/differ/, docs/howto/differential-tester.md
# says how to replay it.
# STACK=smoltcp or netstack has them run in containers whose TCP that stack module runs.
SOAK  := 10m
STACK :=
soak: need-root build lab-packages
	HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) test ./test/sockets -count=1 -timeout 0 -run '^($(if $(STACK),TestDifferModules,TestNamedPrograms|TestDiffer))$$' -v \
		$(STACK:%=-differ.stack=%) -differ.for=$(SOAK) -differ.keep=$(CURDIR)/$(OUT)/differ -differ.findings=20

# Kills at random under load, for CHAOS; SEED repeats a run as far as timing allows. docs/howto/chaos.md.
CHAOS := 5m
SEED  := 0
chaos: need-root build test-packages
	HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) test ./test/lifecycle -count=1 -timeout 0 -run '^TestChaos$$' -v -chaos.for=$(CHAOS) -chaos.seed=$(SEED)
chaos-store: need-root build test-packages
	HEDDLE_BIN=$(CURDIR)/$(BIN) $(GO) test ./test/lifecycle -count=1 -timeout 0 -run '^TestChaosStore$$' -v -chaos.for=$(CHAOS) -chaos.seed=$(SEED)

check: check-packages need-cargo check-bpf
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$unformatted" ] || { echo "gofmt these:"; echo "$$unformatted"; exit 1; }
	clang-format --dry-run -Werror $$(git ls-files "bpf/*.[ch]") internal/bench/baseline/bpf/*.c clib/*/*.c clib/*/*.h
	$(GO) vet ./...
	$(GO) vet -tags attack ./cmd/... ./internal/...
	GOARCH=arm64 CGO_ENABLED=0 $(GO) vet ./cmd/...
	$(GO) tool staticcheck ./...
	$(GO) mod verify >/dev/null
	$(GO) mod tidy -diff
	cd rust && $(CARGO) fmt --all --check && $(CARGO) fmt --check --manifest-path shared-ring/fuzz/Cargo.toml && $(CARGO) fmt --check --manifest-path verbs-protocol/fuzz/Cargo.toml \
		&& $(CARGO) fmt --check --manifest-path heddle-stack/fuzz/Cargo.toml
	cd rust && $(CARGO) clippy --locked --all-targets --quiet -- -D warnings
	cd rust && RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --quiet
	$(GO) test . -count=1 -run '^TestCrates$$'
	$(GO) generate ./internal/plane/tcp/datapath ./internal/bench/baseline
	GO=$(GO) clib/generate.sh
	@git diff --exit-code -- internal/plane/tcp/datapath/'*_bpfel.*' internal/bench/baseline/'*_bpfel.*' \
		rust/verbs-protocol/src/abi.rs rust/verbs-protocol/src/agent_abi.rs rust/heddle-stack/src/abi.rs rust/heddle-stack/src/queues/abi.rs internal/plane/stacks/protocol/abi.go \
		internal/plane/queues/protocol/abi.go internal/plane/verbs/protocol/abi.go || \
		{ echo "generated files were out of date; they are not now: commit them"; exit 1; }

# The order of includes in bpf/ means nothing: each file is compiled by itself, and the object with its files in reverse order.
BPF_CC := clang -target bpf -mcpu=v3 -D__TARGET_ARCH_x86 -Wall -Werror -Ibpf -I/usr/include/x86_64-linux-gnu -fsyntax-only -x c
check-bpf: check-packages
	@for f in $$(cd bpf && find . -name '*.[ch]' | sort); do \
		$(BPF_CC) -Wno-unused-function -include $$f /dev/null || { echo "bpf/$$f does not include what it uses"; exit 1; }; \
	done
	@{ grep '^#include "' bpf/heddle.bpf.c | tac; grep -v '^#include "' bpf/heddle.bpf.c; } | $(BPF_CC) - || \
		{ echo "bpf/heddle.bpf.c depends on the order of its includes"; exit 1; }

generate: check-packages
	$(GO) generate ./internal/plane/tcp/datapath ./internal/bench/baseline
	GO=$(GO) clib/generate.sh

clean:
	-@[ -x $(BIN)/heddle ] && [ "$$(id -u)" = 0 ] && for l in /run/heddle/lab/*/; do [ -d "$$l" ] && $(BIN)/heddle lab down --lab $$(basename $$l); done
	rm -rf $(BIN) $(OUT)
