#!/usr/bin/env python3
"""docker-image NAME FILE: makes FILE an image as `docker save` writes it, of the one layer that comes by standard input, whose
command is a web server. There is no registry to pull one from."""
import hashlib, io, json, sys, tarfile

name, path = sys.argv[1:]
layer = sys.stdin.buffer.read()
config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/bin/httpd", "-f", "-p", "80"], "Env": ["PATH=/bin"]},
                     "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}}).encode()
manifest = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
with tarfile.open(path, "w") as out:
    for file, content in ("config.json", config), ("layer.tar", layer), ("manifest.json", manifest):
        info = tarfile.TarInfo(file)
        info.size = len(content)
        out.addfile(info, io.BytesIO(content))
