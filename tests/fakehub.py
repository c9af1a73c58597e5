"""A Hugging Face Hub over HTTP for tests: users, repositories, LFS uploads, pull requests, and failures on demand.

Run as a program, it serves until killed and prints its address:  python -m tests.fakehub
"""

import base64
import hashlib
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LICENSES = {"apache-2.0", "mit", "llama3", "gemma", "other"}
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
WRITER, READER, STRANGER = "hf_writer0secret", "hf_reader0secret", "hf_stranger0secret"


@dataclass
class Repo:
    """Commits by id (files by path), and the commit of each branch."""

    private: bool = False
    commits: dict = field(default_factory=dict)
    heads: dict = field(default_factory=dict)

    def commit(self, files, branch="main"):
        sha = hashlib.sha1(f"{id(self)}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha], self.heads[branch] = files, sha
        return sha

    def at(self, revision):
        """(commit, files) of a branch or commit; (None, None) where there is none."""
        sha = self.heads.get(revision, revision)
        return (sha, self.commits[sha]) if sha in self.commits else (None, None)


@dataclass
class Failure:
    """Answers `status` instead, or drops the connection after `read` bytes of the body where status is None."""

    route: str
    status: int | None
    times: int = 10**6
    headers: dict = field(default_factory=dict)
    detail: str = ""
    read: int = 0


class FakeHub(ThreadingHTTPServer):
    """Tokens: WRITER is user `me`, READER `me` with a token that only reads, STRANGER user `you`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos, self.blobs, self.failures, self.log = {}, {}, [], []
        self.sent = {}  # file name -> bytes of it that were fetched
        self.tokens = {WRITER: ("me", "write"), READER: ("me", "read"), STRANGER: ("you", "write")}
        self.may_write, self.may_not_create = set(), set()  # (user, repo); users

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def fail(self, route, status, **how):
        self.failures.append(Failure(route, status, **how))

    def add(self, name, folder, private=False):
        """A repository with the files of a folder."""
        repo = self.repos[name] = Repo(private)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return repo.commit({str(path.relative_to(folder)): path.read_bytes() for path in files})

    def files(self, name, revision="main"):
        return self.repos[name].at(revision)[1]

    def routes(self):
        """Names of the routes asked for since the last call, in order."""
        asked, self.log = [route for route, _ in self.log], []
        return asked


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    REPO, REV = r"(?P<name>[^/]+/[^/]+)", r"(?P<rev>[^/]+|refs/pr/\d+)"
    ROUTES = [
        ("POST", "/api/repos/create", "create"),
        ("POST", "/api/validate-yaml", "validate"),
        ("GET", "/api/whoami-v2", "whoami"),
        ("GET", f"/api/models/{REPO}", "info"),
        ("GET", f"/api/models/{REPO}/revision/{REV}", "info"),
        ("GET", f"/api/models/{REPO}/auth-check", "auth_check"),
        ("GET", f"/api/models/{REPO}/auth-check/write", "auth_check_write"),
        ("POST", f"/api/models/{REPO}/branch/{REV}", "branch"),
        ("GET", f"/api/models/{REPO}/tree/{REV}(?P<directory>/.*)?", "tree"),
        ("POST", f"/api/models/{REPO}/preupload/{REV}", "preupload"),
        ("POST", f"/api/models/{REPO}/commit/{REV}", "commit"),
        ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
        ("HEAD|GET", f"/{REPO}/resolve/{REV}/(?P<path>.+)", "resolve"),
    ]

    def handle_any(self):
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        for methods, pattern, route in self.ROUTES:
            if self.command in methods.split("|") and (match := re.fullmatch(pattern, path)):
                return self.answer(route, match.groupdict())
        self.server.log.append((f"{self.command} {self.path}", 404))
        return self.reply(404, {"error": "not found"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def log_message(self, *arguments):
        pass

    def answer(self, route, values):
        length = int(self.headers.get("Content-Length") or 0)
        detail = values.get("oid") or values.get("path") or ""
        for failure in self.server.failures:
            if failure.route == route and failure.times > 0 and failure.detail in detail:
                failure.times -= 1
                self.rfile.read(min(failure.read, length) if failure.status is None else length)
                self.server.log.append((f"{route} failed", detail))
                if failure.status is None:
                    self.close_connection = True
                    return self.connection.close()
                message = (
                    f"told to fail with {failure.status} by {self.headers.get('Authorization')}"  # an indiscreet Hub
                )
                return self.reply(failure.status, {"error": message}, **failure.headers)
        self.body = self.rfile.read(length)
        self.server.log.append((route, detail))
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.user, self.role = self.server.tokens.get(given, (None, None))
        if given and self.user is None:
            message = "Invalid credentials in Authorization header"
            return self.reply(401, {"error": message}, **{"X-Error-Message": message})
        if "name" in values:
            self.repo = self.server.repos.get(values["name"])
            if self.repo is None or (self.repo.private and not self.writable(values["name"])):
                code = 401 if self.user is None else 404  # as the Hub: it does not say which exist
                return self.reply(code, {"error": "Repository not found"}, **{"X-Error-Code": "RepoNotFound"})
        return getattr(self, route)(**values)

    def writable(self, name):
        return self.user is not None and (
            name.startswith(f"{self.user}/") or (self.user, name) in self.server.may_write
        )

    def reply(self, code, body=b"", **headers):
        if not isinstance(body, bytes):
            body, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def forbidden(self):
        return self.reply(403, {"error": "You don't have the required permissions"})

    def whoami(self):
        if self.user is None:
            return self.reply(401, {"error": "Invalid username or password."})
        auth = {"accessToken": {"role": self.role, "displayName": "tests"}}
        return self.reply(200, {"type": "user", "name": self.user, "orgs": [], "auth": auth})

    def create(self):
        asked = json.loads(self.body)
        name = f"{asked['organization'] or self.user}/{asked['name']}"
        if self.role != "write" or self.user in self.server.may_not_create or not name.startswith(f"{self.user}/"):
            return self.forbidden()
        url = f"{self.server.url}/{name}"
        if name in self.server.repos:
            return self.reply(409, {"error": "You already created this model repo", "url": url})
        self.server.repos[name] = Repo(private=asked.get("visibility") == "private")
        self.server.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return self.reply(200, {"url": url, "name": name})

    def validate(self):
        if errors := metadata_errors(json.loads(self.body)["content"]):
            return self.reply(400, {"errors": [{"message": message} for message in errors], "warnings": []})
        return self.reply(200, {"errors": [], "warnings": []})

    def auth_check(self, name):
        return self.reply(200)

    def auth_check_write(self, name):
        return self.reply(200) if self.writable(name) and self.role == "write" else self.forbidden()

    def info(self, name, rev="main"):
        sha, files = self.repo.at(rev)
        if files is None:
            return self.reply(404, {"error": "no revision"}, **{"X-Error-Code": "RevisionNotFound"})
        content = {"_id": "0", "id": name, "modelId": name, "sha": sha, "private": self.repo.private, "tags": []}
        return self.reply(200, content | {"siblings": [{"rfilename": path} for path in files]})

    def branch(self, name, rev):
        if not self.writable(name):
            return self.forbidden()
        if rev in self.repo.heads:
            return self.reply(409, {"error": "Reference already exists"})
        self.repo.heads[rev] = self.repo.heads["main"]
        return self.reply(201, {})

    def tree(self, name, rev, directory=None):
        sha, files = self.repo.at(rev)
        if files is None:
            return self.reply(404, {"error": "no revision"}, **{"X-Error-Code": "RevisionNotFound"})
        if directory:
            return self.reply(404, {"error": "no entry"}, **{"X-Error-Code": "EntryNotFound"})
        entries = [{"type": "file", "path": p, "size": len(b), "oid": git_hash(b)} for p, b in files.items()]
        return self.reply(200, entries, **{"X-Repo-Commit": sha})

    def preupload(self, name, rev):
        if not self.writable(name) and "create_pr" not in self.query:
            return self.forbidden()
        files, entries = self.repo.at(rev)[1] or {}, []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            entry = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in files:
                digest = hashlib.sha256(files[path]).hexdigest() if mode == "lfs" else git_hash(files[path])
                entry["oid"] = digest
            entries.append(entry)
        return self.reply(200, {"files": entries})

    def lfs_batch(self, name):
        objects = []
        for asked in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.server.url}/lfs/{asked['oid']}"}}
            objects.append(asked if asked["oid"] in self.server.blobs else {**asked, "actions": upload})
        return self.reply(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.reply(400, {"error": "not the content that was announced"})
        self.server.blobs[oid] = self.body
        return self.reply(200)

    def commit(self, name, rev):
        opens_pr = "create_pr" in self.query
        if not self.writable(name) and not opens_pr:
            return self.forbidden()
        files = dict(self.repo.at(rev)[1])
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        if opens_pr:
            rev = f"refs/pr/{sum(head.startswith('refs/pr/') for head in self.repo.heads) + 1}"
        sha = self.repo.commit(files, rev)
        content = {"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{name}/commit/{sha}"}
        if opens_pr:
            content["pullRequestUrl"] = f"{self.server.url}/{name}/discussions/{rev.rsplit('/')[-1]}"
        return self.reply(200, content)

    def resolve(self, name, rev, path):
        sha, files = self.repo.at(rev)
        if files is None:
            return self.reply(404, {"error": "no revision"}, **{"X-Error-Code": "RevisionNotFound"})
        if path not in files:
            return self.reply(404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        etag = f'"{hashlib.sha256(files[path]).hexdigest()}"'
        body, code = files[path], 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            body, code = body[int(match[1]) : int(match[2]) + 1], 206
        if self.command == "GET":
            self.server.sent[path] = self.server.sent.get(path, 0) + len(body)
        return self.reply(code, body, **{"ETag": etag, "X-Repo-Commit": sha})


def git_hash(content):
    """Id of a blob in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def metadata_errors(card):
    """What the Hub says of a card's front matter; the rules it documents that a card of ours could break."""
    match = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        return [f"YAML: {error}"]
    if not isinstance(data, dict):
        return ["no metadata"]
    errors = [f"{key} must not be null" for key, value in data.items() if value is None]
    if "license" in data and data["license"] not in LICENSES:
        errors.append(f"license must be one of {sorted(LICENSES)}")
    if data.get("license") == "other" and not data.get("license_name"):
        errors.append("license_name is required with license: other")
    for key in ("base_model", "datasets"):
        for name in [data[key]] if isinstance(data.get(key), str) else data.get(key, []):
            if not REPO_ID.fullmatch(name):
                errors.append(f"{key}: {name!r} is not an id on the Hub")
    for entry in data.get("model-index", []):
        for result in entry["results"]:
            if not result["task"]["type"] or not result["dataset"]["type"] or not result["dataset"]["name"]:
                errors.append("model-index: a result needs the type of its task, and type and name of its dataset")
            if not all(metric["type"] and isinstance(metric["value"], (int, float)) for metric in result["metrics"]):
                errors.append("model-index: a metric needs a type and a number")
    return errors


if __name__ == "__main__":
    with FakeHub() as hub:
        print(hub.url, flush=True)
        sys.stdin.read()
