package ui

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// browser is a Chromium without a window, driven by WebDriver (W3C).
type browser struct {
	t       *testing.T
	session string // address of the session
}

// element is what WebDriver calls an element, by the one key that its standard has for it.
type element map[string]string

const elementKey = "element-6066-11e4-a52e-4f735466cecf"

// start starts one that ends with the test.
func start(t *testing.T, driver string) *browser {
	t.Helper()
	log, err := os.Create(t.TempDir() + "/driver.log")
	testutil.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, driver, "--port=0")
	cmd.Stdout, cmd.Stderr = log, log
	testutil.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // killed
		_ = log.Close()
	})
	b := &browser{t: t}
	port := ""
	testutil.Eventually(t, "chromedriver to start", func() (bool, string) {
		raw, _ := os.ReadFile(log.Name())
		_, after, _ := strings.Cut(string(raw), "started successfully on port ")
		port, _, _ = strings.Cut(after, ".")
		return port != "", string(raw)
	})
	var made struct{ SessionID string }
	b.session = "http://127.0.0.1:" + port + "/session"
	b.call(http.MethodPost, "", map[string]any{"capabilities": map[string]any{"alwaysMatch": map[string]any{
		"goog:chromeOptions": map[string]any{"args": []string{"--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--user-data-dir=" + t.TempDir()}},
		"goog:loggingPrefs":  map[string]string{"browser": "ALL"},
	}}}, &made)
	b.session += "/" + made.SessionID
	t.Cleanup(func() { b.call(http.MethodDelete, "", nil, nil) })
	return b
}

// call is one command of WebDriver's.
func (b *browser) call(method, path string, in, out any) {
	b.t.Helper()
	if err := b.try(method, path, in, out); err != nil {
		b.t.Fatalf("browser: %s %s: %v", method, path, err)
	}
}

func (b *browser) try(method, path string, in, out any) error {
	var body bytes.Buffer // empty, where a command has no parameters
	if in != nil {
		if err := json.NewEncoder(&body).Encode(in); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, b.session+path, &body)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var answer struct{ Value json.RawMessage }
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %.300s", resp.Status, answer.Value)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(answer.Value, out)
}

func (b *browser) open(url string) {
	b.t.Helper()
	b.call(http.MethodPost, "/url", map[string]string{"url": url}, nil)
}

// find gives the element that a CSS selector means.
func (b *browser) find(selector string) element {
	b.t.Helper()
	var e element
	b.call(http.MethodPost, "/element", map[string]string{"using": "css selector", "value": selector}, &e)
	return e
}

// findAll gives all elements that a CSS selector means.
func (b *browser) findAll(selector string) (all []element) {
	b.t.Helper()
	b.call(http.MethodPost, "/elements", map[string]string{"using": "css selector", "value": selector}, &all)
	return all
}

// label gives what a screen reader calls an element, or that it has gone meanwhile.
func (b *browser) label(e element) (text string) {
	b.t.Helper()
	if err := b.try(http.MethodGet, "/element/"+e[elementKey]+"/computedlabel", nil, &text); err != nil {
		return "gone: " + err.Error()
	}
	return text
}

// Keys as WebDriver writes them.
const tabKey, enterKey = "\ue004", "\ue007"

// press presses a key and lets it go.
func (b *browser) press(key string) {
	b.t.Helper()
	b.call(http.MethodPost, "/actions", map[string]any{"actions": []any{map[string]any{"type": "key", "id": "keys",
		"actions": []any{map[string]string{"type": "keyDown", "value": key}, map[string]string{"type": "keyUp", "value": key}}}}}, nil)
}

// dark makes it one whose owner wants pages dark.
func (b *browser) dark() {
	b.t.Helper()
	b.call(http.MethodPost, "/goog/cdp/execute", map[string]any{"cmd": "Emulation.setEmulatedMedia",
		"params": map[string]any{"features": []any{map[string]string{"name": "prefers-color-scheme", "value": "dark"}}}}, nil)
}

func (b *browser) click(selector string) {
	b.t.Helper()
	b.call(http.MethodPost, "/element/"+b.find(selector)[elementKey]+"/click", map[string]string{}, nil)
}

func (b *browser) write(selector, text string) {
	b.t.Helper()
	at := "/element/" + b.find(selector)[elementKey]
	b.call(http.MethodPost, at+"/clear", map[string]string{}, nil)
	b.call(http.MethodPost, at+"/value", map[string]string{"text": text}, nil)
}

// run gives what a script returns.
func (b *browser) run(script string, out any) error {
	return b.try(http.MethodPost, "/execute/sync", map[string]any{"script": script, "args": []any{}}, out)
}

// awaitText waits until what is seen has a text.
func (b *browser) awaitText(text string) {
	b.t.Helper()
	testutil.Eventually(b.t, fmt.Sprintf("the page to show %q", text), func() (bool, string) {
		var seen string
		err := b.run("return document.body.innerText", &seen)
		return err == nil && strings.Contains(seen, text), fmt.Sprint(seen, err)
	})
}

// picture writes down what is seen.
func (b *browser) picture(path string) {
	b.t.Helper()
	var encoded string
	b.call(http.MethodGet, "/screenshot", nil, &encoded)
	raw, err := base64.StdEncoding.DecodeString(encoded)
	testutil.NoError(b.t, err)
	testutil.NoError(b.t, os.WriteFile(path, raw, 0o644))
}

// complaints are what the page's scripts or its policy had to say.
func (b *browser) complaints() []string {
	b.t.Helper()
	var list []struct{ Level, Message string }
	b.call(http.MethodPost, "/se/log", map[string]string{"type": "browser"}, &list)
	var out []string
	for _, l := range list {
		if l.Level == "SEVERE" || l.Level == "WARNING" {
			out = append(out, l.Message)
		}
	}
	return out
}
