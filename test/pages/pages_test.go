// Package pages tries the pages of docs/howto as a stranger would: what they have their reader type
// is typed, as it stands there and in order, on hosts made for it. Comments in the pages, which the
// reader does not see, say which host a block is for:
//
//	<!-- run a -->                       the block after it is typed on host a; a/2 is a second terminal there, a,b both hosts
//	<!-- run a; background -->           in a terminal of its own, where it goes on
//	<!-- run a; fails; shows TEXT -->    it has to fail; it has to print TEXT
//	<!-- run a; until COMMAND -->        the reader goes on when COMMAND succeeds (the last of these)
//	<!-- file a PATH -->                 the block is what the reader writes into PATH
//	<!-- output -->                      the block is what something prints
//	<!-- skip WHY -->                    the block is not tried; it is counted, and named
//	<!-- unseen a                        typed too: what the page says in prose, or what stands for another machine
//	COMMAND -->
//
// In a page that is typed, a block without such a comment fails TestEveryBlockIsTried. A command
// that fails ends its block, and the test.
package pages

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// labName keeps runs side by side apart, as in package lab.
var labName = testutil.LabName()

// waitTimeout bounds every wait, blockTimeout what is typed at once: `make deb` among others, which took
// more than five minutes where others kept the processors busy.
const (
	waitTimeout  = 30 * time.Second
	blockTimeout = 12 * time.Minute
)

// all says whether also the trials are made that need minutes or much of the machine: make
// test-docs.
var all = flag.Bool("pages.all", false, "try the pages that take long, too")

// binaries is where the programs are.
var binaries string

// trial is a session at hosts, in which pages are worked through.
type trial struct {
	name  string
	hosts string   // as connect takes it; "": none
	pages []string // PAGE; PAGE#FROM or PAGE#FROM#TO: from the heading FROM on, or before TO
	needs []string // programs
	long  bool     // for make test-docs
	ready string   // typed on every host before
	// systemd is to be the hosts' init process.
	systemd bool
	// controller is one of cgroup version 2 that the page's engine asks for.
	controller string
	elsewhere  string // what does what the page says, if that is missing
}

// agentUp is what install-on-two-hosts.md does, for pages that begin after it.
const agentUp = `mount -t bpf bpf /sys/fs/bpf
install bin/heddle bin/heddled bin/heddle-runtime /usr/local/bin/
heddled --node a --underlay 192.0.2.1 >/run/heddled.log 2>&1 &
until heddle status; do sleep 0.1; done`

const installed = `install bin/heddle bin/heddled bin/heddle-runtime /usr/local/bin/`

// everything is for pages about a lab, which runs what lies beside heddle: not bin/attack.
const everything = `find bin -maxdepth 1 -type f -exec install -t /usr/local/bin {} +`

// trials are all sessions. What is in none has its reason in notTried.
var trials = []trial{
	{name: "hosts", hosts: "a=192.0.2.1 b=192.0.2.2", needs: []string{"runc", "busybox", "nginx", "tcpdump", "curl", "tar"}, pages: []string{
		"install-on-two-hosts##4. Stop and remove", "runc", "cni", "policy", "limits", "packets", "underlays", "metrics", "see-inside", "observe", "ui", "troubleshoot", "migrate",
		"install-on-two-hosts#4. Stop and remove"}},
	{name: "lab", hosts: "a=192.0.2.1", needs: []string{"runc", "curl", "tcpdump"}, pages: []string{"run-the-lab"}, long: true},
	{name: "firewall", hosts: "a=192.0.2.1", needs: []string{"runc", "python3", "curl", "nft"}, pages: []string{"firewall"}, ready: everything},
	{name: "etcd", hosts: "a=192.0.2.1 etcd1=192.0.2.11 etcd2=192.0.2.12 etcd3=192.0.2.13", needs: []string{"etcd", "etcdctl", "openssl"},
		pages: []string{"external-etcd"}, long: true, ready: installed},
	{name: "docker", hosts: "a=192.0.2.1", needs: []string{"dockerd", "docker", "docker-compose", "busybox", "iptables"}, pages: []string{"docker"}, long: true},
	{name: "podman", hosts: "a=192.0.2.1", needs: []string{"podman", "busybox"}, pages: []string{"podman"}, long: true, ready: agentUp + noResources},
	{name: "containerd", hosts: "a=192.0.2.1", needs: []string{"containerd", "ctr", "busybox"}, pages: []string{"containerd"}, long: true, controller: "cpu", elsewhere: "TestContainerd does what the page says, with version 1",
		ready: agentUp + `
containerd >/run/containerd.log 2>&1 &
until ctr version; do sleep 0.1; done`},
	{name: "debian", hosts: "a=192.0.2.1 b=192.0.2.2", needs: []string{"dpkg-deb", "systemctl"}, pages: []string{"install-debian"}, long: true, systemd: true},
	{name: "rdma", hosts: "a=192.0.2.1", needs: []string{"runc", "ibv_devinfo", "ib_send_bw"}, pages: []string{"rdma"}, long: true, ready: everything},
	{name: "stacks", hosts: "a=192.0.2.1", needs: []string{"runc", "python3", "curl", "clang"}, pages: []string{"stacks", "own-stacks"}, long: true, ready: everything},
	{name: "pool", hosts: "a=192.0.2.1", needs: []string{"runc", "python3"}, pages: []string{"many-connections"}, long: true, ready: everything},
	{name: "attack suite", hosts: "a=192.0.2.1", needs: []string{"jq", "runc"}, pages: []string{"attack-suite"}, long: true},
}

// noResources tells Podman of the limits of a machine without CAP_SYS_RESOURCE, as
// docs/howto/podman.md has it, and that cgroup version 2 may have no controllers.
const noResources = `
printf '[containers]\npids_limit = 0\ndefault_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]\n[engine]\nevents_logger = "file"\ncgroup_manager = "cgroupfs"\n' >/etc/containers/containers.conf`

// notTried are the pages that are not typed here, and why.
var notTried = map[string]string{
	"install-on-kubernetes": "make test-k8s does what it says",
	"kubernetes":            "make test-k8s does what it says",
	"rdma-card":             "it needs cards: make test-rdma-card has emulated ones",
	"rdma-library":          "it has nothing to type",
	"chaos":                 "make chaos takes minutes; the page has its last result",
	"differential-tester":   "it needs a finding",
}

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.run").Value.String() == "^$" { // how gotestsum tries a run again that failed without a failed test
		fmt.Fprintln(os.Stderr, "no test is asked for: that cannot make good for a run that failed outside its tests; what it said stands above")
		os.Exit(1)
	}
	if os.Geteuid() != 0 {
		fmt.Println("SKIP: pages are tried by root only: they make network namespaces, containers and BPF programs")
		os.Exit(0)
	}
	var err error
	if binaries, err = filepath.Abs(cmp.Or(os.Getenv("HEDDLE_BIN"), "../../bin")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if _, err := os.Stat(filepath.Join(binaries, "heddle")); err != nil {
		fmt.Fprintf(os.Stderr, "%v: run `make build` first\n", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestPages makes the trials.
func TestPages(t *testing.T) {
	for _, tr := range trials {
		t.Run(tr.name, func(t *testing.T) {
			if tr.long && !*all {
				t.Skip("takes long: `make test-docs` does it")
			}
			for _, program := range tr.needs {
				if _, err := exec.LookPath(program); err != nil {
					t.Skipf("%s is not installed (`make test-packages` does)", program)
				}
			}
			if raw, err := os.ReadFile(filepath.Join(cgroupRoot(t), "cgroup.controllers")); err != nil || !strings.Contains(string(raw), tr.controller) {
				t.Skipf("cgroup version 2 has no controller %s on this machine, which a host with version 2 alone has: %s", tr.controller, tr.elsewhere)
			}
			tr.make(t)
		})
	}
}

// make works through the trial's pages, up to the first that fails: each begins with what the ones
// before it left. They are no subtests for the same reason: what is tried again is the whole trial,
// on new hosts.
func (tr trial) make(t *testing.T) {
	n := connect(t, tr.hosts, tr.systemd)
	for name := range n.hosts {
		if out, err := n.terminal(t, name).typed(tr.ready); err != nil {
			t.Fatalf("before the pages: %v\n%s", err, out)
		}
	}
	typed, skipped := 0, 0
	for i, ref := range tr.pages {
		began := time.Now()
		did, left := n.work(t, ref, tr.pages[i+1:])
		typed, skipped = typed+did, skipped+left
		t.Logf("%s: %.1f s", ref, time.Since(began).Seconds())
	}
	t.Logf("%d blocks typed, %d not", typed, skipped)
}

// work works through a page, in new terminals. If it fails, the test ends, and says that the pages
// after it were not tried.
func (n *network) work(t *testing.T, ref string, after []string) (typed, skipped int) {
	n.opened = map[string]*terminal{}
	done := false
	defer func() {
		if done {
			return
		}
		for name, term := range n.opened {
			t.Logf("--- terminal %s:\n%s", name, tail(term.said(), 8000))
		}
		t.Errorf("page %s failed, see above; not tried after it: %q", ref, after)
	}()
	blocks, err := blocksOf(ref)
	if err != nil {
		t.Fatal(err)
	}
	page, _, _ := strings.Cut(ref, "#")
	for _, b := range blocks {
		switch b.does {
		case "skip":
			t.Logf("%s.md:%d is not tried: %s", page, b.line, b.why)
			skipped++
		case "output":
		default:
			began := time.Now()
			n.try(t, page, b)
			typed++
			if took := time.Since(began); took > 2*time.Second {
				t.Logf("%s.md:%d took %.1f s", page, b.line, took.Seconds())
			}
		}
	}
	done = true
	return typed, skipped
}

// blocksOf gives the blocks of PAGE, PAGE#FROM or PAGE#FROM#TO.
func blocksOf(ref string) (out []block, err error) {
	parts := strings.Split(ref, "#")
	p, err := readPage(parts[0])
	if err != nil {
		return nil, err
	}
	from, to := "", ""
	if len(parts) > 1 {
		from = parts[1]
	}
	if len(parts) > 2 {
		to = parts[2]
	}
	in := from == ""
	for _, b := range p.blocks {
		in = (in || b.section == from) && (to == "" || b.section != to)
		if in {
			out = append(out, b)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: no blocks there", ref)
	}
	return out, nil
}

// try does what one block says, on all its hosts.
func (n *network) try(t *testing.T, page string, b block) {
	t.Helper()
	on := strings.Split(b.host, ",")
	for _, host := range on {
		n.typeOn(t, host, page, b)
	}
	if b.until == "" {
		return
	}
	for _, host := range on {
		testutil.Eventually(t, fmt.Sprintf("%s.md:%d, on %s, then %s", page, b.line, host, b.until), func() (bool, string) {
			out, err := n.host(t, host).once(t.Context(), b.until)
			return err == nil, out
		})
	}
}

// host is the one of a terminal "a" or "a/2".
func (n *network) host(t *testing.T, terminal string) *host {
	t.Helper()
	name, _, _ := strings.Cut(terminal, "/")
	h := n.hosts[name]
	if h == nil {
		t.Fatalf("there is no host %q", name)
	}
	return h
}

func (n *network) typeOn(t *testing.T, terminal, page string, b block) {
	t.Helper()
	where, h := fmt.Sprintf("%s.md:%d, on %s", page, b.line, terminal), n.host(t, terminal)
	said, err := "", error(nil)
	switch {
	case b.does == "file":
		h.write(b.where, b.text+"\n")
		return
	case b.background:
		bg := n.background(t, h, fmt.Sprintf("%s.md:%d", page, b.line), b.text)
		if b.shows != "" {
			testutil.Eventually(t, where+" to print "+b.shows, func() (bool, string) { said = bg.said(); return strings.Contains(said, b.shows), said })
		}
	case b.fails:
		said, err = n.terminal(t, terminal).typed("if { " + b.text + "\n}; then echo 'no failure'; exit 1; fi")
	default:
		said, err = n.terminal(t, terminal).typed(b.text)
	}
	if err != nil {
		t.Fatalf("%s: %v\n%s\n---\n%s", where, err, b.text, tail(said, 6000))
	}
	if !strings.Contains(said, b.shows) {
		t.Fatalf("%s: without %q in what it prints\n%s\n---\n%s", where, b.shows, b.text, tail(said, 6000))
	}
}

// TestEveryBlockIsTried: a page that is typed says of each of its blocks what is done with it, is
// typed as a whole, and says when it was tried last. The others are named.
func TestEveryBlockIsTried(t *testing.T) {
	files, err := filepath.Glob("../../docs/howto/*.md")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	inTrial, inPages := map[string]bool{}, map[string]bool{}
	for _, tr := range trials {
		for _, ref := range tr.pages {
			blocks, err := blocksOf(ref)
			if err != nil {
				t.Error(err)
			}
			page, _, _ := strings.Cut(ref, "#")
			inPages[page] = true
			for _, b := range blocks {
				inTrial[fmt.Sprint(page, b.line)] = true
			}
		}
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".md")
		if why := notTried[name]; why != "" || !inPages[name] {
			t.Logf("%s.md is not typed: %s", name, cmp.Or(why, "nobody has marked its blocks"))
			continue
		}
		p, err := readPage(name)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, b := range p.blocks {
			switch {
			case b.does == "":
				t.Errorf("%s.md:%d: nothing says what is done with this block", name, b.line)
			case (b.does == "run" || b.does == "unseen") && !inTrial[fmt.Sprint(name, b.line)]:
				t.Errorf("%s.md:%d: in no trial", name, b.line)
			}
		}
		if !strings.HasPrefix(p.tried, "Last tried: 20") && !strings.HasPrefix(p.tried, "Not tried") {
			t.Errorf("%s.md does not end with when, and on what, it was tried last, but with %q", name, p.tried)
		}
	}
}
