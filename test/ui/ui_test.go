// Package ui has a real browser look at the page of `heddle ui` before a live network. It is no
// part of `make test`, because the browser is a large package: make test-ui.
package ui

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

var pictures = flag.String("pictures", "", "folder to write pictures of the page into")

func TestMain(m *testing.M) { os.Exit(lab.Main(m, "ui")) }

// serve runs `heddle ui` until the end of the test and gives the address that it prints.
func serve(t *testing.T, args ...string) string {
	t.Helper()
	p := lab.StartCommand(t, "heddle ui", exec.Command(lab.Bin, append([]string{"ui", "--lab", lab.Name}, args...)...))
	p.WaitFor("token=")
	testutil.Eventually(t, "heddle ui to print its address", func() (bool, string) { return strings.HasSuffix(p.Output(), "\n"), p.Output() })
	return strings.TrimSpace(p.Output())
}

// policy lets web alone reach shop.
const policy = `apiVersion: heddle.dev/v1
kind: Policy
name: shop
subject: {labels: {app: shop}}
ingress:
  default: deny
  rules:
  - {action: allow, peers: [{endpoints: {labels: {app: web}}}]}
`

// TestPage clicks through the views while containers talk.
func TestPage(t *testing.T) {
	driver, err := exec.LookPath("chromedriver")
	if err != nil {
		t.Skip("chromedriver is not installed: make test-ui installs Debian's")
	}
	lab.Heddle(t, "endpoints", "label", "n2/c1", "app=shop", "--node", "n2")
	lab.Heddle(t, "endpoints", "label", "n1/c1", "app=web", "--node", "n1")
	server, client, other := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2")
	server.Must(`l = listen(4, "0.0.0.0", 7400)`)
	talk := func() {
		client.Must(`s = connect(4, %q, 7400)`, lab.Address(t, "heddle", "n2/c1"))
		server.Must(`c = l.accept()[0]`)
		client.Must(`s.sendall(b"x" * 100000)`)
		server.Must(`receive(c, 100000)`)
		client.Must(`s.close()`)
		server.Must(`c.close()`)
	}
	talk()
	other.Expect(`"ECONNREFUSED"`, `error_of(tcp(4).connect, (%q, 7401))`, lab.Address(t, "heddle", "n2/c1"))
	rules := filepath.Join(t.TempDir(), "policy.yaml")
	testutil.NoError(t, os.WriteFile(rules, []byte(policy), 0o600))
	lab.Heddle(t, "policy", "apply", "-f", rules)
	other.Must(`error_of(tcp(4).connect, (%q, 7400))`, lab.Address(t, "heddle", "n2/c1"))

	b := start(t, driver)
	shot := func(name string) {
		if *pictures != "" {
			b.picture(filepath.Join(*pictures, "ui-"+name+".png"))
		}
	}
	address := serve(t, "--listen", "127.0.0.1:0")
	plain, _, _ := strings.Cut(address, "?")
	b.open(plain)
	b.awaitText("the token is missing")
	b.open(address)
	b.awaitText("web")
	b.awaitText("7400")
	var where string
	testutil.NoError(t, b.run("return location.href", &where))
	if strings.Contains(where, "token") {
		t.Errorf("the address keeps the token: %s", where)
	}
	shot("map")

	b.click("nav a[href='?view=flows']")
	b.awaitText("ECONNREFUSED")
	b.awaitText("deny")
	shot("flows")
	b.write("input[name=port]", "7400")
	b.click("form[role=search] button[type=submit]")
	testutil.Eventually(t, "the filter to stand in the address line, and to hold", func() (bool, string) {
		var seen struct{ Where, Text string }
		err := b.run("return {Where: location.search, Text: document.querySelector('tbody').innerText}", &seen)
		return err == nil && strings.Contains(seen.Where, "port=7400") && strings.Contains(seen.Text, ":7400") && !strings.Contains(seen.Text, "7401"), seen.Where + seen.Text
	})
	b.write("input[name=port]", "eighty")
	b.click("form[role=search] button[type=submit]")
	b.awaitText("port:")

	b.open(plain + "?view=endpoints&source=n1/c2&destination=n2/c1&dport=7400")
	b.awaitText("n2/c2")
	b.awaitText("shop")
	b.awaitText("Ingress")
	b.click("nav a[href='?view=nodes']")
	b.awaitText("healthy")
	b.click("nav a[href='?view=time']")
	talk()
	b.awaitText("Now:")
	b.click("nav a[href='?view=faults']")
	b.awaitText("Fallbacks, drops")
	b.click("#pause")
	b.awaitText("Go on")
	checkReach(t, b, plain)
	b.dark()
	b.open(plain)
	b.awaitText("7400")
	var paper string
	testutil.NoError(t, b.run("return getComputedStyle(document.documentElement).backgroundColor", &paper))
	if paper != "rgb(20, 24, 31)" {
		t.Errorf("for who wants it dark the page is %s", paper)
	}
	shot("dark")
	for _, c := range b.complaints() {
		if !strings.Contains(c, "401") && !strings.Contains(c, "400") { // asked for above: without a token, with port "eighty"
			t.Errorf("the browser complains: %s", c)
		}
	}
}

// checkReach checks what those need who have no mouse, or do not see: the first stop of the
// keyboard leads past the views to what they show, and all that can be used has a name.
func checkReach(t *testing.T, b *browser, plain string) {
	t.Helper()
	for _, view := range []string{"map", "flows", "endpoints", "nodes", "time", "faults"} {
		b.open(plain + "?view=" + view)
		var first, then string
		b.press(tabKey)
		testutil.NoError(t, b.run("return document.activeElement.className", &first))
		b.press(enterKey)
		testutil.NoError(t, b.run("return document.activeElement.localName", &then))
		if first != "skip" || then != "main" {
			t.Errorf("view %s: Tab leads to %q, and Enter there to %q", view, first, then)
		}
		for _, e := range b.findAll("a, button, input, select, [role=region], [role=img]") {
			if b.label(e) == "" {
				var what string
				b.call("GET", "/element/"+e[elementKey]+"/property/outerHTML", nil, &what)
				t.Errorf("view %s: no name for %.200s", view, what)
			}
		}
	}
}
