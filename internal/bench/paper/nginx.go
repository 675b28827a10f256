package paper

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"heddle.dev/heddle/internal/bench/loadgen"
)

// The load of the paper's wrk2.
const (
	httpThreads     = 2
	httpConnections = 100
)

// nginxApp serves a file. A hundred requests a connection are the default of the paper's nginx
// 1.10: with later ones' 1,000 the connections made on the fly, of which the paper speaks, would
// all but vanish.
func nginxApp(name, title, file string, rate float64) App {
	return App{
		Name: name, Title: title, Rate: rate, family: "nginx",
		programs: []tool{program("nginx", "nginx-light")},
		prepare:  prepareNginx,
		warmUp:   time.Second, mark: loadgen.Measured + "\n",
		server: func(l launch) []string {
			// One configuration a server: it cannot be told an address otherwise.
			return []string{"sh", "-c", `printf '%s' "$2" >"$1" && exec nginx -c "$1"`, "sh",
				filepath.Join(l.dir, fmt.Sprintf("nginx-%d.conf", l.number)), nginxConfig(l)}
		},
		client: func(l launch) []string {
			return loadCommand(l, "http", httpThreads, httpConnections, "-path", "/"+file)
		},
		read: readLoad,
	}
}

// nginxConfig has one process: a master that is killed would leave its workers behind.
func nginxConfig(l launch) string {
	return fmt.Sprintf(`daemon off;
master_process off;
worker_processes 1;
user root;
pid %[1]s/nginx-%[2]d.pid;
error_log stderr;
events { worker_connections 1024; }
http {
	access_log off;
	sendfile on;
	keepalive_requests 100;
	server {
		listen %[3]s;
		root %[1]s/www;
	}
}
`, l.dir, l.number, l.address)
}

func prepareNginx(_ context.Context, p *run) error {
	www := filepath.Join(p.dir, "www")
	if err := os.Mkdir(www, 0o755); err != nil {
		return err
	}
	for name, size := range map[string]int{"1k": 1 << 10, "1m": 1 << 20} {
		if err := os.WriteFile(filepath.Join(www, name), bytes.Repeat([]byte{'x'}, size), 0o644); err != nil {
			return err
		}
	}
	return nil
}
