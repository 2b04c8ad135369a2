#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["waitress>=2.1.2"]
# ///
"""buffer.py: a webhook buffer in one file. Senders are answered at once, consumers take
their time.

    ADDR=127.0.0.1:8080 TOKEN=a-long-random-secret python buffer.py

Senders
    POST /webhook[/...]           200 {"status":"ok"} once the body is on disk; where
                                  SECRET_<FONTE> is set, /webhook/<fonte> takes what is
                                  signed; with FORWARD_<FONTE> alone it has a name only
Consumers
    POST /fila/pegar?limite=50    lease the oldest messages: a JSON array of items, or [];
                                  with espera=20 it waits for one; with agrupar=8 each item
                                  is a conversation, eight seconds after its last message
    POST /fila/{id}/processado    done
    POST /fila/{id}/erro          failed for good; a text body is kept as the reason
    POST /fila/{id}/devolver      failed for now: again later, em=SECONDS or by backoff
    POST /fila/{id}/estender      still at work: segundos=SECONDS more
    POST /fila/{id}/reenviar      once more from the start
    POST /fila/processado ...     the same for many, with {"ids":[1,2]}
Delivery
    FORWARD_URL=http://...        each message by POST to a URL, one after the other
    FORWARD_URL=amqp://...        or to RabbitMQ: done when the broker has confirmed it
Operators
    GET /painel                   the page: the queue in a browser
    GET /fila, GET /fila/{id}     look, without changing anything; DELETE /fila/{id} erases
    GET /fila?busca=TEXT          find it in ids, events, conversations, paths and payloads
    GET /fila/motivos             why messages failed, and how many for each reason
    GET /fila/quantas?status=     how many a filter lets through, before verdicts by filter
    GET /health                   200 while messages can be stored, else 503
    GET /metrics                  numbers for Prometheus; METRICS_TOKEN opens it too
    python buffer.py status       the same as a table, from the file
    python buffer.py backup FILE  a copy of the file, also while the service runs
    ALERT_URL                     is told when something is wrong, and when it is over

Every request but those for /painel and /health carries the token: X-Token,
Authorization: Bearer, or ?token= (the header wins).

The life of a message

    POST /webhook --> pendente --pegar--> processando --processado--> processado
                        ^  ^                 |  |                        |
                        |  +-devolver, lease-+  +--erro, or attempts     RETENTION_DAYS
                        |    ended              |  used up               |
                        +------reenviar------- erro                      deleted

A 200 means committed and synced. Delivery is at least once: a message comes out again
when its lease ends before it is settled, and `tentativa` counts how often. Trouble on
this side is 503 with Retry-After, never a 4xx.

Settings come from the environment: `python buffer.py --help` lists them. As a WSGI
application under another server it is `buffer:application`. What stands above in this
file knows nothing of what stands below.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - said before an older one stumbles
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"buffer.py needs Python 3.10, this is {found}. Try: python3.12 buffer.py")

import argparse
import base64
import bisect
import codecs
import collections
import contextlib
import dataclasses
import datetime
import email.utils
import errno
import fcntl
import functools
import hashlib
import heapq
import hmac
import http
import http.client
import io
import ipaddress
import itertools
import json
import logging
import math
import os
import queue
import re
import resource
import secrets
import select
import selectors
import shutil
import signal
import socket
import sqlite3
import stat
import tempfile
import threading
import time
import traceback
import types
import typing
import urllib.parse
import zlib

__version__ = "1.0.0"

log = logging.getLogger("buffer")


def safe_text(error):
    """What a log may say of an exception. The text of most can be a payload or a token:
    KeyError's is the key."""
    kind = type(error).__name__
    if isinstance(error, OSError):
        return f"{kind}: {error.strerror}" if error.strerror else kind
    if isinstance(error, sqlite3.Error):  # "Could not decode to UTF-8 ... with text '"
        return f"{kind}: {error}".partition(" with text ")[0]
    return kind


def trail(error):
    """A traceback as one line without values: the last steps, by their names."""
    steps = list(traceback.walk_tb(error.__traceback__))[-10:]
    places = [
        f"{os.path.basename(frame.f_code.co_filename)}:{line} {frame.f_code.co_name}"
        for frame, line in steps
    ]
    return f"{safe_text(error)} at {', '.join(places)}"


def discreet(record):
    """A filter for logs, which makes a trail() of a traceback."""
    if record.exc_info and record.exc_info[1]:
        text, where = record.getMessage(), trail(record.exc_info[1])
        record.fields = {"message": text, "traceback": where}
        record.msg, record.args = f"{text}: {where}", ()
        record.exc_info = record.exc_text = None
    return True


log.addFilter(discreet)


class Repeats:
    """Log lines that would flood the log: the first of a kind, then one a minute."""

    def __init__(self, how, clock=time.monotonic):
        self.how, self.clock = how, clock
        self.total = collections.Counter()
        self._logged = {}  # kind: (when, total by then)
        self._kept = {}  # kind: text and values of the last one that was not logged

    def __call__(self, kind, text, *values, times=1):
        self.total[kind] += times
        self._kept[kind] = text, values
        self.flush([kind])

    def flush(self, kinds=None, gap=60):
        """Logs what was kept back, unless its kind was logged in the last `gap` seconds:
        without this nobody would learn how long a burst went on after its first."""
        now = self.clock()
        for kind in kinds or list(self._kept):
            when, before = self._logged.get(kind, (-math.inf, 0))
            kept = self._kept.pop(kind, None) if now - when >= gap else None
            if kept:  # and no other thread had it
                (text, values), total = kept, self.total[kind]
                self._logged[kind] = now, total
                fields = {"kind": kind, "number": total, "new": total - before}
                values = *values, total, total - before
                text = f"{text} (number %d, %d new)"
                log.log(self.how, text, *values, extra={"fields": fields})


class StartError(Exception):
    """The service cannot start. The text is one line for the operator."""

    def __init__(self, text, status=1):
        super().__init__(text)
        self.status = status  # to exit with


# Settings


# A setting's parser raises ValueError for what its docstring does not name; the
# docstring is what the operator gets to read then.


def matched(pattern, text):
    found = re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII)
    if not found:
        raise ValueError(text)
    return found.groups()


def within(low, high, number):
    if not low <= number <= high:
        raise ValueError(number)
    return number


def seconds(text):
    """a whole number of seconds from 1 to 604800"""
    return within(1, 604800, int(*matched("([0-9]{1,9})", text)))


def count(text):
    """a whole number from 0 to 1000000"""
    return within(0, 1000000, int(*matched("([0-9]{1,9})", text)))


def attempts(text):
    """a whole number from 1 to 1000"""
    return within(1, 1000, int(*matched("([0-9]{1,9})", text)))


def switch(text):
    """0 or 1"""
    return int(*matched("([01])", text))


def days(text):
    """a number of days from 0.001 to 36500, such as 7 or 0.5"""
    return within(0.001, 36500, float(*matched(r"([0-9]{1,5}(?:\.[0-9]+)?)", text)))


def space(text):
    """a number of bytes, or one such as 512K, 256M or 2G"""
    number, unit = matched("([0-9]{1,12})([KMG]?)", text)
    return int(number) << " KMG".index(unit.upper() or " ") * 10


def size(text):
    """a number of bytes, or one such as 512K or 32M, up to 512M"""
    return within(1, 512 << 20, space(text))


def tokens(text):
    """one or more tokens, separated by commas, none of them empty"""
    found = tuple(token.strip().encode() for token in text.split(","))
    within(1, math.inf, min(map(len, found)))
    return found


def address(text):
    """:8080, 127.0.0.1:8080, [::1]:8080 or unix:/path/buffer.sock"""
    if text.startswith("unix:/"):
        return "unix", text[len("unix:") :]
    host, port = matched(r"(\[[^]/]+\]|[^][:/]*):([0-9]{1,5})", text)
    return host.strip("[]"), within(0, 65535, int(port))


def path(text):
    """a path; the folder is made when it is missing"""
    return text


def networks(text):
    """addresses or networks, separated by commas, such as 127.0.0.1,10.0.0.0/8"""
    parts = filter(None, text.replace(",", " ").split())
    return tuple(ipaddress.ip_network(part, strict=False) for part in parts)


def log_format(text):
    """text or json"""
    return matched("(text|json)", text)[0].lower()


def level(text):
    """DEBUG, INFO, WARNING or ERROR"""
    return matched("(DEBUG|INFO|WARNING|ERROR)", text)[0].upper()


def public_url(text):
    """a URL such as https://hooks.example.com, without query"""
    return matched(r"(https?://[^\s?#]+?)/*", text)[0] if text else ""


def secret_url(text):
    """a URL such as https://host/path, without user; or nothing"""
    if not text:
        return None
    host = r"(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?"
    [url] = matched(rf"(https?://{host}(?:[/?][!-~]*)?)", text)
    within(0, 65535, urllib.parse.urlsplit(url).port or 0)
    return url


def one_secret(text):
    """a secret that is not empty, without blanks around it"""
    within(1, math.inf, len(text.removeprefix("whsec_")))
    if text != text.strip():
        raise ValueError(text)
    return text.encode()


ID_WORD = r"-|\$(?:\.[^\s.,|]+)+|[A-Za-z0-9-]+"


def id_words(text):
    """ID words (a header, or $.a.path.0 into the JSON), separated by commas"""
    return tuple(matched(f"({ID_WORD})", word.strip())[0] for word in text.split(","))


def workers(text):
    """a whole number from 1 to 256"""
    return within(1, 256, int(*matched("([0-9]{1,9})", text)))


def target_url(text):
    """one URL with http://, https:// or amqp://, such as http://n8n:5678/webhook/x"""
    if text:
        # a comma and another one is no list: each message goes to one place
        matched(r"(https?|amqps?)://(?!.*,\w+://)[!-~]+", text.replace("#", " "))
        parts = urllib.parse.urlsplit(text)
        within(1, 65535, 1 if parts.port is None else parts.port)
        within(1, math.inf, len(parts.hostname or ""))
    return text or None


def header_value(text):
    """the value of a header, in one line"""
    return matched("([ -~\xa0-\xff]+)", text)[0]


def key_words(text):
    """ID words such as $.data.key.remoteJid, separated by | (the first found); - is none"""
    words = [matched(f"({ID_WORD})", word.strip())[0] for word in text.split("|")]
    return tuple(word for word in words if word != "-")


def own_key_words(text):
    """as GROUP_KEY"""
    return key_words(text) if text else None


def scheme(text):
    """a preset's name, or three words: HEADER TEMPLATE ID"""
    return text


def setting(default, parse, meaning, name=None):
    """One setting: its default as text (None for a secret), parser and meaning.

    Its environment variable is the field's name in capitals, or `name`.
    """
    facts = {"default": default, "parse": parse, "meaning": meaning, "name": name}
    return dataclasses.field(repr=default is not None, metadata=facts)


def settings_of(cls, fonte="<FONTE>"):
    """(field, environment variable, facts) of each setting in a settings class."""
    for field in dataclasses.fields(cls):
        if field.metadata:
            name = field.metadata["name"] or field.name.upper()
            yield field.name, name.format(fonte), field.metadata


def read_settings(cls, environ, fonte=""):
    """{field: value} for a settings class. StartError with status 2 says what is wrong.

    `NAME=` means the default, as it does in environment files; but not for a secret,
    which would let everybody in when it is empty by mistake.
    """
    values = {}
    for field, name, facts in settings_of(cls, fonte):
        is_secret = facts["default"] is None
        text = environ.get(name)
        if not is_secret:
            text = text or facts["default"]
        try:
            values[field] = facts["parse"](text) if text is not None else None
        except ValueError:
            shown = re.sub("[^,]+", "***", text) if is_secret else text
            takes = facts["parse"].__doc__
            raise StartError(f"{name}={shown!r}: it takes {takes}", 2) from None
    return values


def read_headers(environ):
    """(name, value) of each FORWARD_HEADER_<NAME>. StartError as above."""
    headers = []
    for name in sorted(environ):
        found = re.fullmatch("FORWARD_HEADER_([A-Z0-9_]+)", name, re.IGNORECASE)
        if found:
            if found[1].upper() in ("CONTENT_LENGTH", "TRANSFER_ENCODING"):
                raise StartError(f"{name}: that is for buffer.py to say", 2)
            try:
                value = header_value(environ[name])
            except ValueError:
                takes = header_value.__doc__
                raise StartError(f"{name}='***': it takes {takes}", 2) from None
            headers.append((found[1].replace("_", "-"), value))
    return tuple(headers)


@dataclasses.dataclass(frozen=True)
class SourceSettings:
    """What is set for a source, under the name in its path in capitals. Without a secret
    it has a name only, and its senders a token."""

    secret: bytes = setting(
        None, one_secret, "makes /webhook/<fonte> a source that signs", "SECRET_{}"
    )
    secret_old: bytes = setting(
        None, one_secret, "a second secret, while rotating", "SECRET_{}_OLD"
    )
    sign: str = setting("", scheme, "how it signs", "SIGN_{}")
    tolerance: int = setting(
        "300", count, "seconds a timestamp may be off; 0 is off", "TOLERANCE_{}"
    )
    forward: str = setting(
        None,
        target_url,
        "where to deliver what comes to /webhook/<fonte>, also without SECRET_<FONTE>",
        "FORWARD_{}",
    )
    group_key: tuple = setting(
        "", own_key_words, "instead of GROUP_KEY", "GROUP_KEY_{}"
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings. The environment variable is the field's name in capitals."""

    token: tuple = setting(
        None, tokens, "may do everything; required; several, with commas, to rotate"
    )
    webhook_token: tuple = setting(
        None, tokens, "may only send, so that one that leaks cannot drain the queue"
    )
    metrics_token: tuple = setting(None, tokens, "may only read /metrics")
    addr: tuple = setting(":8080", address, "where to listen")
    db_path: str = setting("./dados/buffer_webhooks.sqlite", path, "the database")
    max_body: int = setting(
        "32M", size, "largest webhook (Evolution API sends media as base64 in JSON)"
    )
    max_unverified: int = setting(
        "64M", size, "bytes on their way, all together, from senders not known yet"
    )
    lease: int = setting(
        "600", seconds, "seconds a consumer has before a message is given out again"
    )
    max_attempts: int = setting(
        "10", attempts, "deliveries of a message before it goes to erro"
    )
    backoff: int = setting(
        "30", seconds, "seconds before the first new attempt; doubles up to an hour"
    )
    retention_days: float = setting(
        "7", days, "days a processed message is kept after it was settled"
    )
    max_batch_bytes: int = setting(
        "16M", size, "payload bytes in one batch, but always at least one message"
    )
    request_timeout: int = setting(
        "120", seconds, "seconds from a request's first byte to its last"
    )
    public_url: str = setting(
        "", public_url, "where senders reach this, for schemes that sign the URL"
    )
    verify_token: bytes = setting(
        None,
        one_secret,
        "answers Meta's GET hub.challenge, where this is its verify token",
    )
    dedupe: tuple = setting(
        "-", id_words, "where the event id of a plain webhook lives, for duplicates"
    )
    dedupe_days: float = setting("7", days, "days an event id is remembered")
    group_key: tuple = setting(
        "-", key_words, "where a message's conversation is, such as its phone number"
    )
    rate_limit: int = setting(
        "0", count, "webhooks a second from one address, 0 for no limit"
    )
    min_free: int = setting(
        "256M", space, "free bytes on the disk below which senders get 503; 0 is off"
    )
    max_pending: int = setting(
        "0", count, "messages in the queue at which senders get 503; 0 is off"
    )
    alert_url: str = setting(
        None, secret_url, "is told when something is wrong, and when it is over"
    )
    alert_age: int = setting(
        "900", count, "seconds a message may be due before that is an alarm; 0 is off"
    )
    alert_silence: int = setting(
        "0", count, "seconds without a message that are an alarm; 0 is off"
    )
    trusted_proxy: tuple = setting(
        "", networks, "proxies whose X-Forwarded-For is believed"
    )
    forward_url: str = setting(
        None, target_url, "where to deliver messages, instead of waiting for consumers"
    )
    forward_concurrency: int = setting(
        "1", workers, "deliveries at the same time; with 1 the order is kept"
    )
    forward_timeout: int = setting(
        "300", seconds, "seconds a target has to answer a delivery"
    )
    forward_rate: int = setting(
        "0", count, "deliveries that are begun in a second, 0 for no limit"
    )
    forward_group: int = setting(
        "0", count, "delivers conversations after so many seconds of silence; 0 is off"
    )
    forward_serie: int = setting(
        "0", switch, "1 delivers never two messages of one conversation at once"
    )
    forward_header: tuple = setting(
        None, header_value, "a header for the target", "FORWARD_HEADER_<NAME>"
    )
    log_level: str = setting("INFO", level, "how much is logged, on standard error")
    log_format: str = setting("text", log_format, "how: as text or as JSON lines")

    sources: tuple = ()  # pairs of a source's name and its SourceSettings

    @classmethod
    def read(cls, environ):
        """Settings from a mapping such as os.environ. StartError says what is wrong."""
        if not environ.get("TOKEN"):
            token = secrets.token_urlsafe(32)
            raise StartError(
                f"TOKEN is missing. Try: TOKEN={token} python buffer.py", 2
            )
        own = {name for _, name, _ in settings_of(cls)}
        sources = {}
        for name in sorted(environ):
            found = re.fullmatch(
                "SECRET_(.+?)(?:_OLD)?|(?:SIGN|TOLERANCE|FORWARD|GROUP_KEY)_(.+)", name
            )
            if not found or name in own or name.startswith("FORWARD_HEADER_"):
                continue
            source = found[1] or found[2]
            if source != source.upper().replace("-", "_"):
                raise StartError(f"{name}: write it in capitals, and - as _", 2)
            sources[source] = cls.read_source(environ, source, name)
        values = read_settings(cls, environ)
        values["forward_header"] = read_headers(environ)
        return cls(**values, sources=tuple(sources.items()))

    @staticmethod
    def read_source(environ, source, name):
        """The SourceSettings of one, of which a variable is set: `name`."""
        signs = f"SECRET_{source}" in environ
        if not signs and not name.startswith(("FORWARD_", "GROUP_KEY_")):
            raise StartError(f"{name} is set, but not SECRET_{source}", 2)
        if not signs and not environ.get(f"FORWARD_{source}"):
            text = (
                f"{name} is set, but not SECRET_{source}, and FORWARD_{source} neither"
            )
            raise StartError(text, 2)
        try:
            return SourceSettings(**read_settings(SourceSettings, environ, source))
        except StartError as error:
            if signs or not str(error).startswith("FORWARD_"):
                raise
            path = source.lower().replace("_", "-")  # FORWARD_PORT=tcp: Kubernetes'
            more = f"it would say where to deliver what comes to /webhook/{path}"
            raise StartError(f"{error}; {more}", 2) from None


# Metrics

# Seconds and numbers up to which a histogram counts.
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
NUMBERS = (1, 3, 10, 30, 100, 300, 1000)


class Histogram:
    """How many values were up to each bound, since this process started."""

    def __init__(self, bounds):
        self.bounds, self.sum = bounds, 0
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all of them

    def observe(self, value, times=1):
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times


STATUSES = ("pendente", "processando", "processado", "erro")

# What is counted in the file: name there, family, its label, meaning.
COUNTERS = {
    "recebidas": ("received", "source", "Webhooks that were kept."),
    "duplicadas": ("duplicates", "source", "Webhooks that were known already."),
    "recusadas": ("refused", "reason", "Requests that were refused."),
    "entregues": ("claimed", "", "Messages given to consumers."),
    "resolvidas": ("settled", "verdict", "Verdicts that have changed a message."),
    "vencidas": ("leases_expired", "", "Leases that ended without a verdict."),
    "esgotadas": ("exhausted", "", "Messages gone to erro after their last attempt."),
    "apagadas": ("purged", "", "Messages deleted by age."),
}

# Values of a label that are there from the start.
KNOWN = {
    "": ("",),
    "verdict": ("processado", "erro", "devolver", "estender", "reenviar"),
}

GAUGES = (
    ("mais_antiga", "oldest_due_seconds", "Age of the oldest message that is due."),
    ("arquivo", "database_bytes", "Size of the database."),
    ("wal", "wal_bytes", "Size of the WAL beside it."),
    ("livre", "disk_free_bytes", "Free space on its disk."),
)

TALKS = (
    ("esperando", "waiting", "Conversations that wait, up to 10,000."),
    ("mais_antiga", "oldest_seconds", "Age of the oldest conversation that waits."),
    ("em_trabalho", "in_work", "Conversations in work, up to 10,000."),
)


def families(report, histograms):
    """What Prometheus gets to read: families (name, type, meaning, samples), a sample
    being (ending of the name, labels, number). `histograms` has (name, meaning, label,
    {its value: Histogram})."""
    versions = {"python": sys.version.split()[0], "sqlite": sqlite3.sqlite_version}
    yield "info", "gauge", "Versions.", [("", {"version": __version__, **versions}, 1)]
    messages = [
        ("", {"source": row["fonte"] or "", "status": row["status"]}, row["quantidade"])
        for row in report["mensagens"]
    ]
    yield "messages", "gauge", "Messages by status and source.", messages
    for key, name, meaning in GAUGES:
        yield name, "gauge", meaning, [("", {}, report[key] or 0)]
    for key, name, meaning in TALKS if report["conversas"] else ():
        number = report["conversas"][key] or 0
        yield f"conversations_{name}", "gauge", meaning, [("", {}, number)]
    for key, (name, label, meaning) in COUNTERS.items():
        # a series that begins with its first event shows no increase by it
        known = dict.fromkeys(KNOWN.get(label, ()), 0)
        numbers = {**known, **report["contadores"][key]}
        yield f"{name}_total", "counter", meaning, labelled(label, numbers)
    for name, meaning, label, found in histograms:
        several = [buckets(labels, one) for _, labels, one in labelled(label, found)]
        yield name, "histogram", meaning, itertools.chain(*several)


def delivery_families(report):
    """The same of a delivery: attempts by outcome, and how its targets are."""
    targets = [({"target": one["destino"]}, one) for one in report]
    attempts = [
        ("", {**target, "outcome": outcome}, n)
        for target, one in targets
        for outcome, n in one["tentativas"].items()
    ]
    states = [("", {**target, "state": one["estado"]}, 1) for target, one in targets]
    flying = [("", target, one["em_voo"]) for target, one in targets]
    yield "delivery_attempts_total", "counter", "Deliveries by outcome.", attempts
    yield "delivery_breaker", "gauge", "The state in which a target is.", states
    yield "delivery_in_flight", "gauge", "Deliveries under way.", flying


def labelled(label, values):
    return [("", {label: key} if label else {}, n) for key, n in values.items()]


def buckets(labels, histogram):
    """The samples of a histogram."""
    counts = itertools.accumulate(histogram.counts)
    for bound, count in zip([*histogram.bounds, "+Inf"], counts):
        yield "_bucket", {**labels, "le": str(bound)}, count
    yield "_sum", labels, histogram.sum
    yield "_count", labels, count


def exposition(families):
    """Prometheus's text format, version 0.0.4."""
    lines = []
    for name, kind, meaning, samples in families:
        lines.append(f"# HELP buffer_{name} {meaning}")
        lines.append(f"# TYPE buffer_{name} {kind}")
        for ending, labels, number in samples:
            text = ",".join(f'{k}="{escaped(v)}"' for k, v in labels.items())
            braces = f"{{{text}}}" if text else ""
            lines.append(f"buffer_{name}{ending}{braces} {number}")
    return "\n".join([*lines, ""])


def escaped(text):
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# The store

# The first five columns are those of the Go program whose files are taken over. It must
# still be able to open a file and insert into it, so every later column has a default.
TABLE = """
CREATE TABLE IF NOT EXISTS fila (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    payload    TEXT NOT NULL,
    status     TEXT NOT NULL DEFAULT 'pendente',
    locked_at  DATETIME,
    created_at DATETIME DEFAULT CURRENT_TIMESTAMP
)"""
OLD_COLUMNS = {"id", "payload", "status", "locked_at", "created_at"}
NEW_COLUMNS = {
    "lease_until": "TEXT",  # processando: when the lease ends
    "attempts": "INTEGER NOT NULL DEFAULT 0",  # how often it was given out
    # pendente: size of the claim it was lost in (in conversations, where it was one of
    # those); processando: minus the size of its claim
    "lost": "INTEGER NOT NULL DEFAULT 0",
    "available_at": "TEXT",  # pendente: not before then; NULL is at once
    "settled_at": "TEXT",  # processado, erro: since when
    "source": "TEXT",
    "event_id": "TEXT",
    "group_key": "TEXT",  # its conversation
    "size": "INTEGER",  # bytes of the payload
    "method": "TEXT",
    "path": "TEXT",  # what followed /webhook/ or the source, escaped as it came
    "query": "TEXT",  # as it came, but for the token
    "headers": "TEXT",  # a JSON object, without credentials
    "reason": "TEXT",  # erro: why
    "consumer": "TEXT",  # processando: who has it, where that has a name
    "tries": "TEXT",  # lines: second, what, who has it now or why it ended; see TOLD
}

# An event id is unique in fila. Here stand, oldest first, those that outlive their message.
EVENTS = """
CREATE TABLE IF NOT EXISTS eventos (
    id       INTEGER PRIMARY KEY,
    source   TEXT NOT NULL,
    event_id TEXT NOT NULL,
    seen_at  TEXT NOT NULL,
    UNIQUE (source, event_id)
)"""

# fila_queue holds all that a claim needs to choose, in the order of ids, whatever the
# payloads weigh; a message that is not due has available_at and stands elsewhere in it.
# The others cost a plain webhook nothing. Statements name their index, or none for the
# id: without statistics SQLite would take fila_queue(status=?) and read a million rows.
INDEXES = """
DROP INDEX IF EXISTS idx_fila_status;
CREATE INDEX IF NOT EXISTS fila_queue
    ON fila(status, available_at, id, size, lost, attempts);
CREATE INDEX IF NOT EXISTS fila_source
    ON fila(source, status, available_at, id, size, lost, attempts)
 WHERE source IS NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS fila_event ON fila(coalesce(source, ''), event_id)
 WHERE event_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS fila_delayed
    ON fila(id, size, status, available_at)
 WHERE status = 'pendente' AND available_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS fila_delayed_source
    ON fila(source, id, size, status, available_at)
 WHERE status = 'pendente' AND available_at IS NOT NULL AND source IS NOT NULL;
CREATE INDEX IF NOT EXISTS fila_lease ON fila(lease_until, size, status)
 WHERE status = 'processando';
CREATE INDEX IF NOT EXISTS fila_consumer ON fila(consumer, size, status)
 WHERE status = 'processando' AND consumer IS NOT NULL;
CREATE INDEX IF NOT EXISTS fila_settled ON fila(settled_at, size, status)
 WHERE status = 'processado';
CREATE INDEX IF NOT EXISTS fila_reason ON fila(reason, id, size, source, status)
 WHERE status = 'erro'
"""

# For delivery to one place, when some sources have a place of their own: it must not walk
# past what waits for them. It would cost senders, so it is only there while it is needed.
PLAIN_INDEX = """
CREATE INDEX IF NOT EXISTS fila_plain
    ON fila(status, available_at, id, size, lost, attempts)
 WHERE source IS NULL"""
NO_PLAIN_INDEX = "DROP INDEX IF EXISTS fila_plain"

# What has happened since the file was made, as the methods of Store count it, and how
# many messages there are: name is their status, label their source or nothing. The
# latter is kept by triggers, so that it is right after a kill -9 and whoever changes a
# message, the Go program and the sqlite3 shell included. All in one table, because
# every page that a commit touches is felt by a sender who is alone.
COUNTERS_TABLE = """
CREATE TABLE contadores (
    name  TEXT NOT NULL,
    label TEXT NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (name, label)
) WITHOUT ROWID"""
COUNT_ALL = """
INSERT INTO contadores (name, label, n)
SELECT status, source, sum(n)
  FROM (SELECT value AS status, '' AS source, 0 AS n
          FROM json_each('["pendente","processando","processado","erro"]')
         UNION ALL
        SELECT status, '', count(*)
          FROM fila INDEXED BY fila_queue
         GROUP BY status
         UNION ALL
        SELECT status, '', -count(*)
          FROM fila INDEXED BY fila_source
         WHERE source IS NOT NULL
         GROUP BY source, status
         UNION ALL
        SELECT status, source, count(*)
          FROM fila INDEXED BY fila_source
         WHERE source IS NOT NULL
         GROUP BY source, status)
 GROUP BY status, source"""
COMES = """
    INSERT INTO contadores (name, label, n)
    VALUES (new.status, coalesce(new.source, ''), 1)
        ON CONFLICT (name, label) DO UPDATE SET n = n + 1;"""
GOES = """
    UPDATE contadores
       SET n = n - 1
     WHERE name = old.status
       AND label = coalesce(old.source, '');"""
TRIGGERS = (
    f"CREATE TRIGGER conta_nova AFTER INSERT ON fila BEGIN {COMES} END",
    f"CREATE TRIGGER conta_apagada AFTER DELETE ON fila BEGIN {GOES} END",
    f"""
CREATE TRIGGER conta_mudada AFTER UPDATE OF status, source ON fila
  WHEN old.status <> new.status OR old.source IS NOT new.source
 BEGIN {GOES} {COMES} END""",
)

# Of each minute of the last hour, ten minutes of the last day and hour of the last week,
# what had been counted before its first commit. `at` counts such steps since 1970.
ROOMS = {1: 60, 10: 144, 60: 168}  # minutes of a step: how many are kept
MINUTES_TABLE = """
CREATE TABLE IF NOT EXISTS minutos (
    step     INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    received INTEGER NOT NULL,
    done     INTEGER NOT NULL,
    failed   INTEGER NOT NULL,
    PRIMARY KEY (step, at)
) WITHOUT ROWID"""

# What was wrong when the service last looked, for who reads only the file.
PROBLEMS_TABLE = """
CREATE TABLE IF NOT EXISTS problemas (
    kind  TEXT NOT NULL,
    name  TEXT NOT NULL,
    since INTEGER NOT NULL,
    seen  INTEGER NOT NULL,
    text  TEXT NOT NULL,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID"""

# What outlives a restart of each target, as JSON.
TARGETS_TABLE = """
CREATE TABLE IF NOT EXISTS destinos (
    name  TEXT PRIMARY KEY,
    facts TEXT NOT NULL
) WITHOUT ROWID"""
TARGETS = "SELECT name, facts FROM destinos"
TARGET = "INSERT OR REPLACE INTO destinos VALUES (:name, :facts)"
PROBLEMS = "SELECT kind, name, since, seen, text FROM problemas ORDER BY since, kind"
PROBLEM = "INSERT INTO problemas VALUES (?, ?, ?, ?, ?)"

# What tells this file from others whose messages have the same ids: random, made with the
# file, and the same in a backup of it.
FILE_ID_TABLE = "CREATE TABLE IF NOT EXISTS arquivo (id TEXT NOT NULL)"
NEW_FILE_ID = """
INSERT INTO arquivo (id)
SELECT :id
 WHERE NOT EXISTS (SELECT 1 FROM arquivo)"""
FILE_ID = "SELECT id FROM arquivo"

HAPPENED = """
INSERT INTO contadores (name, label, n)
VALUES (?, ?, ?)
    ON CONFLICT (name, label) DO UPDATE SET n = n + excluded.n"""

SO_FAR = """
SELECT coalesce(sum(iif(name = 'recebidas', n, 0)), 0) AS received,
       coalesce(sum(iif(label = 'processado', n, 0)), 0) AS done,
       coalesce(sum(iif(label = 'erro' OR name = 'esgotadas', n, 0)), 0) AS failed
  FROM contadores
 WHERE name IN ('recebidas', 'esgotadas')
    OR (name = 'resolvidas' AND label IN ('processado', 'erro'))"""

MINUTE = f"""
INSERT INTO minutos (step, at, received, done, failed)
SELECT value, :minute / value, received, done, failed
  FROM json_each('{json.dumps(list(ROOMS))}') CROSS JOIN ({SO_FAR})
 WHERE true
    ON CONFLICT DO NOTHING"""

COUNTED = "SELECT name, label, n FROM contadores ORDER BY name, label"
HISTORY = """
SELECT at, received, done, failed
  FROM minutos
 WHERE step = :step
 ORDER BY at"""

# Those to come are there after the clock was set back.
OTHER_HOURS = """
DELETE FROM minutos
 WHERE step = :step
   AND (at <= :at - :room OR at > :at)"""

# What the Go program left without lease (it gave ten minutes), size or time of settling,
# or with a delay of ours; and what has had more attempts than are allowed now.
ADOPT = (
    """
UPDATE fila INDEXED BY fila_lease
   SET lease_until = coalesce(datetime(locked_at, '+600 seconds'), :now)
 WHERE status = 'processando'
   AND (lease_until IS NULL OR lease_until <= locked_at)""",
    """
UPDATE fila INDEXED BY fila_queue
   SET size = length(CAST(payload AS BLOB))
 WHERE status IN ('pendente', 'processando', 'processado', 'erro')
   AND size IS NULL""",
    """
UPDATE fila INDEXED BY fila_settled
   SET settled_at = :now
 WHERE status = 'processado'
   AND settled_at IS NULL""",
    """
UPDATE fila INDEXED BY fila_queue
   SET available_at = NULL
 WHERE status IN ('processando', 'processado', 'erro')
   AND available_at IS NOT NULL""",
    """
UPDATE fila INDEXED BY fila_queue
   SET status = 'erro',
       settled_at = :now,
       available_at = NULL,
       reason = coalesce(reason, 'tentativas esgotadas')
 WHERE status = 'pendente'
   AND attempts >= :most""",
)

# Conversations. Senders only keep group_key: an index on it would cost a webhook 5 us, a
# trigger 3. All else is made when it is first asked for. `abertas` has the open messages
# of each conversation, `conversas` what a claim needs to choose. gather() makes both
# right, from the new messages, behind `conversas_lidas`, and from `mudadas`, where
# triggers write down what became of the others, whoever changed them. (At once would be
# dear: each message has its conversation on another page.) A message without a key has
# its id for one, a number. CASE, since the Go program's SQLite may be too old for iif().
STATE = """CASE WHEN {0}.status = 'processando' THEN 0
             WHEN {0}.status <> 'pendente' THEN NULL
             WHEN {0}.available_at IS NULL THEN 2
             ELSE 1 END"""
GROUPS = (
    """
CREATE TABLE abertas (
    source     TEXT NOT NULL,
    group_key  NOT NULL,
    state      INTEGER NOT NULL,  -- 0 is leased, 1 delayed, 2 due
    id         INTEGER NOT NULL,
    created_at TEXT,
    size       INTEGER,
    attempts   INTEGER,
    lost       INTEGER,
    PRIMARY KEY (source, group_key, state, id)
) WITHOUT ROWID""",
    """
CREATE TABLE mudadas (
    source, group_key, state, id INTEGER PRIMARY KEY, created_at, size, attempts, lost,
    was  -- its state in `abertas`
)""",
    """
CREATE TABLE conversas (
    source     TEXT NOT NULL,
    group_key  NOT NULL,
    in_work    INTEGER NOT NULL,
    first      INTEGER,  -- its first message, if that is due; NULL while none may go out
    oldest     TEXT,     -- when that arrived
    attempts   INTEGER,
    lost       INTEGER,
    newest     TEXT,
    PRIMARY KEY (source, group_key)
) WITHOUT ROWID""",
    "CREATE TABLE conversas_lidas (id INTEGER NOT NULL)",
    "INSERT INTO conversas_lidas (id) VALUES (0)",
    "CREATE INDEX conversas_in_work ON conversas(in_work) WHERE in_work = 1",
    """
CREATE INDEX conversas_newest ON conversas(newest, first) WHERE first IS NOT NULL""",
    """
CREATE INDEX conversas_oldest ON conversas(oldest, first) WHERE first IS NOT NULL""",
    """
CREATE INDEX conversas_newest_source ON conversas(source, newest, first)
 WHERE first IS NOT NULL""",
    """
CREATE INDEX conversas_oldest_source ON conversas(source, oldest, first)
 WHERE first IS NOT NULL""",
    f"""
CREATE TRIGGER conversas_update
 AFTER UPDATE OF status, available_at, attempts, lost, size ON fila
BEGIN
INSERT INTO mudadas
VALUES (coalesce(new.source, ''), coalesce(new.group_key, new.id), {STATE.format("new")},
        new.id, coalesce(new.created_at, ''), new.size, new.attempts, new.lost,
        {STATE.format("old")})
    ON CONFLICT (id) DO UPDATE
   SET state = excluded.state, attempts = excluded.attempts, lost = excluded.lost,
       size = excluded.size;
END""",
    f"""
CREATE TRIGGER conversas_delete AFTER DELETE ON fila
  WHEN old.status IN ('pendente', 'processando')
BEGIN
INSERT INTO mudadas (source, group_key, id, was)
VALUES (coalesce(old.source, ''), coalesce(old.group_key, old.id), old.id,
        {STATE.format("old")})
    ON CONFLICT (id) DO UPDATE
   SET state = NULL;
END""",
)

IS_GROUPED = "SELECT 1 FROM sqlite_master WHERE name = 'conversas_delete'"

LAST_READ = "SELECT id FROM conversas_lidas"
READ = (
    f"""
INSERT OR IGNORE INTO mudadas
SELECT coalesce(source, ''), coalesce(group_key, id), {STATE.format("fila")},
       id, coalesce(created_at, ''), size, attempts, lost, {STATE.format("fila")}
  FROM fila NOT INDEXED
 WHERE id IN (SELECT value FROM json_each(:ids))""",
    "UPDATE conversas_lidas SET id = :last",
)

# The first :limit that have changed, then what becomes of them and their conversations.
LAST_CHANGED = """
SELECT count(*), max(id)
  FROM (SELECT id
          FROM mudadas
         ORDER BY id
         LIMIT :limit)"""
GATHER = (
    """
DELETE FROM abertas
 WHERE (source, group_key, state, id) IN (SELECT source, group_key, was, id
                                            FROM mudadas
                                           WHERE id <= :last
                                             AND was IS NOT NULL)""",
    """
INSERT OR REPLACE INTO abertas
SELECT source, group_key, state, id, created_at, size, attempts, lost
  FROM mudadas
 WHERE id <= :last
   AND state IS NOT NULL
 ORDER BY source, group_key""",
    """
DELETE FROM conversas
 WHERE (source, group_key) IN (SELECT source, group_key
                                 FROM mudadas
                                WHERE id <= :last)""",
    """
INSERT INTO conversas
SELECT k.source, k.group_key,
       EXISTS (SELECT 1
                 FROM abertas
                WHERE (source, group_key, state) = (k.source, k.group_key, 0)),
       a.id, a.created_at, a.attempts, a.lost,
       (SELECT created_at
          FROM abertas
         WHERE (source, group_key, state) = (k.source, k.group_key, 2)
         ORDER BY id DESC
         LIMIT 1)
  FROM (SELECT DISTINCT source, group_key
          FROM mudadas
         WHERE id <= :last
         ORDER BY source, group_key) AS k
  LEFT JOIN abertas AS a
    ON (a.source, a.group_key, a.state) = (k.source, k.group_key, 2)
   AND a.id = (SELECT min(id)
                 FROM abertas
                WHERE (source, group_key, state) = (k.source, k.group_key, 2))
   AND NOT EXISTS (SELECT 1
                     FROM abertas
                    WHERE (source, group_key, state) = (k.source, k.group_key, 0))
   AND NOT EXISTS (SELECT 1
                     FROM abertas
                    WHERE (source, group_key, state) = (k.source, k.group_key, 1)
                      AND id < a.id)
 WHERE EXISTS (SELECT 1
                 FROM abertas
                WHERE (source, group_key) = (k.source, k.group_key))""",
    "DELETE FROM mudadas WHERE id <= :last",
)

QUIET = """
SELECT source, group_key, first, attempts, CAST(lost AS INTEGER) AS lost
  FROM conversas INDEXED BY conversas_newest
 WHERE first IS NOT NULL
   AND newest <= :quiet
 ORDER BY newest, first
 LIMIT :limit"""

# Whose newest is of a time to come: somebody has set the clock back.
SET_BACK = QUIET.replace("newest <= :quiet", "newest > :soon")

WAITED = """
SELECT source, group_key, first, attempts, CAST(lost AS INTEGER) AS lost
  FROM conversas INDEXED BY conversas_oldest
 WHERE first IS NOT NULL
   AND oldest <= :waited
 ORDER BY oldest, first
 LIMIT :limit"""

# How many go out, now or once they are silent, up to :limit; since when the first waits.
GROUPS_WAITING = """
SELECT count(*), max(0, :epoch - CAST(strftime('%s', min(oldest)) AS INTEGER))
  FROM (SELECT oldest
          FROM conversas INDEXED BY conversas_oldest
         WHERE first IS NOT NULL
           AND oldest > ''
         ORDER BY oldest
         LIMIT :limit)"""

GROUPS_IN_WORK = """
SELECT count(*)
  FROM (SELECT 1
          FROM conversas INDEXED BY conversas_in_work
         WHERE in_work = 1
         LIMIT :limit)"""

OF_GROUP = """
SELECT id, CAST(size AS INTEGER) AS size
  FROM abertas
 WHERE source = :source
   AND group_key = :group_key
   AND state = 2
   AND attempts < :most
   AND id < coalesce((SELECT min(id)
                        FROM abertas
                       WHERE source = :source
                         AND group_key = :group_key
                         AND state = 1), 9e18)
 ORDER BY id
 LIMIT :limit"""

# CAST, because a str of a 32 MB body with one emoji in it would take 128 MB. Not by name,
# because this is the one statement whose binding of parameters can be felt.
WEBHOOK = """
INSERT INTO fila (payload, created_at, size, source, event_id, group_key, method, path,
                  query, headers)
VALUES (CAST(? AS TEXT), ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO NOTHING"""
WEBHOOK_BYTES = WEBHOOK.replace("CAST(? AS TEXT)", "?")

SEEN = """
SELECT 1
  FROM eventos
 WHERE source = coalesce(:source, '')
   AND event_id = :event_id"""

# Appends a line to what became of a message, and keeps about the last ten attempts.
TOLD_LENGTH = 1200
TOLD = f"tries = substr(coalesce(tries, '') || :told, -{TOLD_LENGTH})"

TAKEN = """
SELECT 1
  FROM fila INDEXED BY fila_event
 WHERE coalesce(source, '') = coalesce(:source, '')
   AND event_id IS NOT NULL
   AND event_id = :event_id
   AND CAST(payload AS BLOB) <> :payload
 UNION ALL """ + SEEN.lstrip()

LEASES_OVER = """
SELECT id, CAST(size AS INTEGER) AS size
  FROM fila INDEXED BY fila_lease
 WHERE status = 'processando'
   AND lease_until <= :now
 ORDER BY lease_until
 LIMIT :limit"""

LEASE_ENDED = f"""
UPDATE fila NOT INDEXED
   SET {TOLD},
       status = iif(attempts < :most, 'pendente', 'erro'),
       settled_at = iif(attempts < :most, NULL, :now),
       reason = iif(attempts < :most, reason,
                    coalesce(reason, 'prazo esgotado na última tentativa')),
       lost = abs(lost),
       locked_at = NULL,
       lease_until = NULL
 WHERE id IN (SELECT value FROM json_each(:ids))
RETURNING status, reason"""

HELD = """
SELECT id, CAST(size AS INTEGER) AS size
  FROM fila INDEXED BY fila_consumer
 WHERE consumer = :consumer
   AND status = 'processando'
 ORDER BY id
 LIMIT :limit"""

DELAYS_OVER = """
SELECT id, CAST(size AS INTEGER) AS size
  FROM fila INDEXED BY fila_queue
 WHERE status = 'pendente'
   AND available_at <= :now
 ORDER BY available_at
 LIMIT :limit"""

DELAY_ENDED = """
UPDATE fila NOT INDEXED
   SET available_at = NULL
 WHERE id IN (SELECT value FROM json_each(:ids))"""

DUE = """
SELECT id, CAST(size AS INTEGER) AS size, CAST(lost AS INTEGER) AS lost, attempts
  FROM fila INDEXED BY fila_queue
 WHERE status = 'pendente'
   AND available_at IS NULL
   AND attempts < :most
   AND id > :after
 ORDER BY id
 LIMIT :limit"""

IN_WORK = """
SELECT count(*)
  FROM (SELECT 1
          FROM fila INDEXED BY fila_lease
         WHERE status = 'processando'
           AND lease_until > :now
         LIMIT :limit)"""

# CAST, because what is damaged (TEXT that is not UTF-8, a number that is none) would spoil
# the whole claim.
ITEM = """id, CAST(payload AS BLOB) AS body, CAST(attempts AS INTEGER) AS attempts, created_at,
          source, event_id, group_key, method, path, query, headers"""

PEGAR = f"""
UPDATE fila NOT INDEXED
   SET {TOLD},
       status = 'processando',
       locked_at = :now,
       lease_until = :until,
       attempts = attempts + 1,
       consumer = :consumer,
       lost = -:claim
 WHERE id IN (SELECT value FROM json_each(:ids))
RETURNING {ITEM}"""

# The five verdicts. Which status each may change stands in its WHERE, and those on which
# it changes nothing and is no error beside its method. `attempt` is the fence.
CHOSEN = """
 WHERE id IN (SELECT value FROM json_each(:ids))
   AND (:attempt IS NULL OR attempts = :attempt)"""

PROCESSADO = f"""
UPDATE fila NOT INDEXED
   SET {TOLD},
       status = 'processado',
       settled_at = :now,
       lease_until = NULL,
       available_at = NULL,
       reason = NULL {CHOSEN}
   AND status <> 'processado'
RETURNING id, status"""

ERRO = f"""
UPDATE fila NOT INDEXED
   SET {TOLD},
       status = 'erro',
       settled_at = :now,
       lease_until = NULL,
       available_at = NULL,
       reason = :reason {CHOSEN}
   AND status IN ('pendente', 'processando')
RETURNING id, status, reason"""

# Without a delay: backoff, doubled with each attempt up to an hour, give or take a fifth.
# An attempt that is `spared` was none: what it was to reach could not be reached.
DEVOLVER = f"""
UPDATE fila NOT INDEXED
   SET {TOLD},
       status = iif(attempts < :most, 'pendente', 'erro'),
       settled_at = iif(attempts < :most, NULL, :now),
       available_at = iif(attempts < :most AND coalesce(:delay, 1) > 0, datetime(
           :epoch + coalesce(:delay,
                    min(3600, :backoff << min(max(coalesce(:tries, attempts), 1) - 1, 20))
                    * (80 + coalesce(:jitter, abs(random() % 41))) / 100.0),
           'unixepoch'), NULL),
       reason = coalesce(:reason, reason,
                         iif(attempts < :most, NULL, 'devolvida na última tentativa')),
       attempts = attempts - (:spared AND attempts > 0),
       lost = 0,
       locked_at = NULL,
       lease_until = NULL {CHOSEN}
   AND status = 'processando'
RETURNING id, status, reason"""

ANTECIPAR = f"""
UPDATE fila NOT INDEXED
   SET available_at = NULL {CHOSEN}
   AND status = 'pendente'
   AND available_at IS NOT NULL
RETURNING id, status, reason"""

# Conversations of which a verdict settles more than one message.
TOGETHER = """
SELECT json_group_array(id) AS ids, max(attempts) AS tries
  FROM fila NOT INDEXED
 WHERE id IN (SELECT value FROM json_each(:ids))
   AND group_key IS NOT NULL
 GROUP BY source, group_key
HAVING count(*) > 1"""

ESTENDER = f"""
UPDATE fila NOT INDEXED
   SET lease_until = :until {CHOSEN}
   AND status = 'processando'
RETURNING id, status"""

REENVIAR = f"""
UPDATE fila NOT INDEXED
   SET {TOLD},
       status = 'pendente',
       attempts = 0,
       lost = 0,
       settled_at = NULL,
       locked_at = NULL,
       reason = NULL {CHOSEN}
   AND status IN ('erro', 'processado')
RETURNING id, status"""

PENDING = """
SELECT total(n)
  FROM contadores
 WHERE name IN ('pendente', 'processando')"""

ARRIVALS = "SELECT total(seq) FROM sqlite_sequence WHERE name = 'fila'"

STATUS = """
SELECT id, status, attempts
  FROM fila NOT INDEXED
 WHERE id IN (SELECT value FROM json_each(:ids))"""

LIST = """
SELECT id, CAST(size AS INTEGER) AS size
  FROM fila INDEXED BY fila_queue
 WHERE status = :status
   AND available_at IS NULL
   AND id > :after
   AND id <= :until
 ORDER BY id
 LIMIT :limit"""

LIST_DELAYED = """
SELECT id, CAST(size AS INTEGER) AS size
  FROM fila INDEXED BY fila_delayed
 WHERE status = 'pendente'
   AND available_at IS NOT NULL
   AND id > :after
   AND id <= :until
 ORDER BY id
 LIMIT :limit"""

# An empty :reason means those without one.
LIST_REASON = """
SELECT id, CAST(size AS INTEGER) AS size
  FROM fila INDEXED BY fila_reason
 WHERE status = 'erro'
   AND reason IS nullif(:reason, '')
   AND id > :after
   AND id <= :until
   AND (:source IS NULL OR source = :source)
 ORDER BY id
 LIMIT :limit"""

LIST_REASONS = LIST_REASON.replace(
    "IS nullif(:reason, '')", "IN (SELECT value FROM json_each(:reason))"
)

# The same with the newest first.
NEWEST = {
    sql: sql.replace("ORDER BY id", "ORDER BY id DESC")
    for sql in (LIST, LIST_DELAYED, LIST_REASON, LIST_REASONS)
}

COUNT = {
    sql: f"SELECT count(*), max(id) FROM ({sql})"
    for sql in (LIST, LIST_DELAYED, LIST_REASON, LIST_REASONS)
}

REASONS = """
SELECT DISTINCT reason
  FROM fila INDEXED BY fila_reason
 WHERE status = 'erro'
   AND reason IS NOT NULL"""

SEARCHED = """
SELECT id, CAST(size AS INTEGER) AS size, CAST(payload AS BLOB) AS body,
       event_id, group_key, path
  FROM fila NOT INDEXED
 WHERE id IN (SELECT value FROM json_each(:ids))
 ORDER BY id DESC"""

LAST_ID = "SELECT coalesce(max(id), 0) FROM fila"
CAME = """
SELECT id, coalesce(created_at, '') AS created_at
  FROM fila NOT INDEXED
 WHERE id >= :id
 ORDER BY id
 LIMIT 1"""

# The same for one source.
OF_SOURCE = {
    sql: sql.replace("fila_queue", "fila_source")
    .replace("fila_delayed", "fila_delayed_source")
    .replace("WHERE", "WHERE source = :source\n   AND")
    for sql in (
        DUE,
        DELAYS_OVER,
        LIST,
        LIST_DELAYED,
        NEWEST[LIST],
        NEWEST[LIST_DELAYED],
        COUNT[LIST],
        COUNT[LIST_DELAYED],
    )
}
OF_SOURCE.update(
    (
        sql,
        re.sub("(conversas_newest|conversas_oldest)", r"\1_source", sql).replace(
            "WHERE", "WHERE source = :source\n   AND"
        ),
    )
    for sql in (QUIET, WAITED, SET_BACK)
)

DUE_PLAIN = DUE.replace("fila_queue", "fila_plain").replace(
    "WHERE", "WHERE source IS NULL\n   AND"
)

SOURCES = """
SELECT label
  FROM contadores
 WHERE name = 'pendente'
   AND n > 0"""

# It steps from source to source in the index: two look-ups for each that sends ids.
EVENTO = """
WITH RECURSIVE sources(name) AS (
    SELECT ''
     UNION ALL
    SELECT (SELECT coalesce(source, '')
              FROM fila INDEXED BY fila_event
             WHERE event_id IS NOT NULL
               AND coalesce(source, '') > name
             ORDER BY coalesce(source, '')
             LIMIT 1)
      FROM sources
     WHERE name IS NOT NULL
)
SELECT id, CAST(size AS INTEGER) AS size
  FROM sources CROSS JOIN fila INDEXED BY fila_event
 WHERE coalesce(source, '') = name
   AND event_id = :event
   AND (:source IS NULL OR name = :source)"""

MOTIVOS = """
SELECT reason, count(*) AS count, max(id) AS until
  FROM fila INDEXED BY fila_reason
 WHERE status = 'erro'
   AND id > :after
   AND id <= :until
   AND (:source IS NULL OR source = :source)
 GROUP BY reason
 ORDER BY count(*) DESC
 LIMIT :limit"""
MOTIVO = MOTIVOS.replace("GROUP", "  AND reason IS nullif(:reason, '')\n GROUP")

LOOK = f"""
SELECT {ITEM}, tries, consumer, status, reason,
       CAST(coalesce(size, length(CAST(payload AS BLOB))) AS INTEGER) AS size,
       lease_until, available_at, settled_at
  FROM fila
 WHERE id = :id"""
LOOK_SHORT = LOOK.replace(
    "CAST(payload AS BLOB) AS body", "substr(CAST(payload AS BLOB), 1, 2048) AS body"
)
LOOK_WITHOUT = LOOK.replace("CAST(payload AS BLOB) AS body", "x'' AS body")

OLD = """
SELECT id, CAST(size AS INTEGER) AS size
  FROM fila INDEXED BY fila_settled
 WHERE status = 'processado'
   AND settled_at < :before
 ORDER BY settled_at
 LIMIT :limit"""

DELETE = "DELETE FROM fila WHERE id IN (SELECT value FROM json_each(:ids)) RETURNING id"

REMEMBER = """
INSERT INTO eventos (source, event_id, seen_at)
SELECT coalesce(source, ''), event_id, created_at
  FROM fila NOT INDEXED
 WHERE id IN (SELECT value FROM json_each(:ids))
   AND event_id IS NOT NULL
    ON CONFLICT DO NOTHING"""

FORGET = """
DELETE FROM eventos
 WHERE id IN (SELECT id
                FROM eventos
               ORDER BY id
               LIMIT :limit)
   AND seen_at < :before
RETURNING id"""

# Since when the first in the queue is due, and what would join it if somebody claimed.
OLDEST_DUE = """
SELECT :epoch - CAST(strftime('%s', min(since)) AS INTEGER)
  FROM (SELECT created_at AS since
          FROM fila NOT INDEXED
         WHERE id = (SELECT min(id)
                       FROM fila INDEXED BY fila_queue
                      WHERE status = 'pendente'
                        AND available_at IS NULL)
         UNION ALL
        SELECT min(available_at)
          FROM fila INDEXED BY fila_queue
         WHERE status = 'pendente'
           AND available_at <= :now
         UNION ALL
        SELECT min(lease_until)
          FROM fila INDEXED BY fila_lease
         WHERE status = 'processando'
           AND lease_until <= :now)"""

OLDEST_OPEN = """
SELECT :epoch - CAST(strftime('%s', min(created_at)) AS INTEGER)
  FROM fila NOT INDEXED
 WHERE id = (SELECT min(id)
               FROM (SELECT min(id) AS id
                       FROM fila INDEXED BY fila_queue
                      WHERE status = 'pendente'
                        AND available_at IS NULL
                      UNION ALL
                     SELECT min(id)
                       FROM fila INDEXED BY fila_delayed
                      WHERE status = 'pendente'
                        AND available_at IS NOT NULL
                      UNION ALL
                     SELECT min(id)
                       FROM fila INDEXED BY fila_queue
                      WHERE status = 'processando'
                        AND available_at IS NULL))"""

DELAYED = """
SELECT count(*)
  FROM (SELECT 1
          FROM fila INDEXED BY fila_delayed
         WHERE status = 'pendente'
           AND available_at IS NOT NULL
         LIMIT :limit)"""

TOTALS = "SELECT name, sum(n) FROM contadores GROUP BY name"

SHIFT = (
    """
UPDATE fila INDEXED BY fila_lease
   SET lease_until = datetime(lease_until, :step),
       locked_at = datetime(locked_at, :step)
 WHERE status = 'processando'""",
    """
UPDATE fila
   SET available_at = datetime(available_at, :step)
 WHERE id IN (SELECT id
                FROM fila INDEXED BY fila_delayed
               WHERE status = 'pendente'
                 AND available_at IS NOT NULL)""",
)


# What begins, ends and undoes a transaction, and those inside it.
LEVELS = (
    ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"),
    *(
        (f"SAVEPOINT at{n}", f"RELEASE at{n}", f"ROLLBACK TO at{n}")
        for n in range(1, 5)
    ),
)

JOINED = contextlib.nullcontext()  # what is done belongs to the transaction around it


def utc(timestamp):
    """Seconds since the epoch as it stands in the file: UTC, YYYY-MM-DD HH:MM:SS."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(timestamp))


def text_of(data):
    """TEXT of the file; bytes that are no UTF-8 become such as do not encode again."""
    return data.decode("utf-8", "surrogateescape")


def fitting(rows, limit, max_bytes):
    """Ids of up to `limit` rows that have at most so many bytes, but at least one.

    A message that does not fit is passed over: it opens the next batch.
    """
    ids, total = [], 0
    for row in rows:
        size = row["size"] or 0  # whoever inserts by hand gives none
        if len(ids) < limit and (not ids or total + size <= max_bytes):
            ids.append(row["id"])
            total += size
    return ids


def without_poison(rows, limit, most):
    """(rows, limit) of a claim in which one message cannot take all the others along.

    When a consumer dies, nobody knows which message of its batch killed it. So one whose
    lease ran out comes back only among its like and in half as big a claim, the last
    time alone. The oldest due message decides whether it is such a claim. `lost` is the
    size of the claim it was lost in, and not above 0 where it was not. In a claim of
    conversations each row is one, with what is known of its first message.
    """
    first = rows[0]
    if first["lost"] <= 0:
        return [row for row in rows if row["lost"] <= 0], limit
    limit = min(limit, first["lost"] // 2)
    if limit < 2 or first["attempts"] + 1 >= most:
        return rows[:1], 1
    lost = [row for row in rows if row["lost"] // 2 >= limit]
    return [row for row in lost if row["attempts"] + 1 < most], limit


def size_of(path):
    """A file's bytes, 0 when it is not there."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.getsize(path)
    return 0


class Outcome(typing.NamedTuple):
    """What became of a verdict: `status` is the message's now, None when there is none.

    `refused` says why it was not settled: unknown, conflict (its status does not allow
    it), superseded (it has been given out again since); or nothing.
    """

    refused: str
    status: str
    attempts: int = None


class Store:
    """The messages, in one SQLite file behind one connection.

    The lock is held from BEGIN to COMMIT and over execute and fetch: on Python 3.12 a
    connection shared with less locking gave one thread another thread's rows. Methods
    raise sqlite3.Error when the file fails, and nothing of what they did is kept then.
    `clock` gives seconds since the epoch.
    """

    VERSION = 2  # PRAGMA user_version of our files; the Go program leaves it at 0
    REBUILT = 256 << 20  # bytes; an old file up to this size is rebuilt at start
    BUSY = 5  # seconds to wait for another process before giving up
    BITE = 1000, 16 << 20  # rows and bytes whose leases or delays end at once
    REASONS = 100  # that dead() tells apart
    SLICE, SLICE_BYTES = 200, 4 << 20  # messages that search() reads at once
    GLANCE = 1 << 20  # bytes of a payload of which a list shows the start
    COUNTED = 10_000  # conversations up to which report() counts
    MANY = 1000  # messages in a claim of conversations, as many as one verdict takes
    NEW, PATIENCE = 2000, 0.1  # messages that it sorts at once, and seconds for all

    def __init__(
        self, path, clock=time.time, max_attempts=10, backoff=30, grouped=False
    ):
        """Opens or makes the file, for conversations too where it is `grouped`.
        StartError when it cannot be used."""
        if sqlite3.sqlite_version_info < (3, 35):
            found = sqlite3.sqlite_version
            raise StartError(
                f"SQLite {found} is too old, 3.35 is needed. A newer Python brings it: "
                "uv run --python 3.12 buffer.py"
            )
        self.path, self.clock = os.path.abspath(path), clock
        self.most, self.backoff = max_attempts, backoff
        self._dead = collections.Counter()  # reasons of what has gone to erro
        self._fallen = []  # reasons of what goes there with the commit to come
        self.used_up = Repeats(logging.WARNING)
        self.erased = False  # bytes of a deleted message are still in the WAL
        self._lock = threading.RLock()
        self._at = self._now = None  # when the outermost began: in seconds, as text
        self._log = []  # (name, label) of each thing that has happened in it
        self._marks = []  # for each that is open, how long _log and _fallen were before
        self._waiting = collections.Counter()  # refusals, until something is written
        self._minute = None  # the last one of which MINUTE has seen the beginning
        self._before = self._own = 0  # changes before it; changes that counting made
        self.commits = Histogram(SECONDS)  # the seconds that those took that wrote
        try:
            with self._alone():
                self._db = self._connect()
                self._prepare()
                if grouped:
                    self.group()
            self._files = self._identities()
            if os.stat(self.path).st_mode & 0o077:
                log.warning("others can read it, try: chmod 600 %s*", self.path)
        except (sqlite3.Error, OSError) as error:
            raise StartError(f"DB_PATH={path!r} cannot be used: {error}") from error

    def _identities(self):
        """Which files stand under the names of the database and its WAL; None is none."""
        found = []
        for name in (self.path, f"{self.path}-wal"):
            with contextlib.suppress(FileNotFoundError):
                facts = os.stat(name)
                found.append((facts.st_dev, facts.st_ino))
        return found

    def is_replaced(self):
        """Whether what is open does not stand at DB_PATH any more. SQLite does not see
        it: commits would go on into files that nobody finds again."""
        return self._identities() != self._files

    def rescue(self):
        """A command that copies the open file, which may have no name; None where the
        system does not show it."""
        self.checkpoint()  # the WAL would not be in the copy
        folder = f"/proc/{os.getpid()}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    facts = os.stat(f"{folder}/{name}")
                    if (facts.st_dev, facts.st_ino) == self._files[0]:
                        return f"cp {folder}/{name} rescued.sqlite"
        return None

    @contextlib.contextmanager
    def _alone(self):
        """One process at a time: a VACUUM or another journal under a writer loses rows.

        The lock is on the folder, since SQLite has its own on the file.
        """
        os.makedirs(os.path.dirname(self.path), mode=0o750, exist_ok=True)
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _connect(self):
        if not os.path.exists(self.path):  # closing an open database frees its locks
            # SQLite gives the -wal and -shm files the mode of this one
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        options = {"isolation_level": None, "check_same_thread": False}
        db = sqlite3.connect(self.path, timeout=self.BUSY, **options)
        db.row_factory = sqlite3.Row
        db.text_factory = text_of  # one bad byte must not spoil a whole claim
        return db

    def _prepare(self):
        [[version]] = self._run("PRAGMA user_version")
        if version not in (0, self.VERSION):
            age = "newer" if version > self.VERSION else "preliminary"
            raise sqlite3.DatabaseError(
                f"a {age} buffer.py made it (format {version}, not {self.VERSION})"
            )
        columns = {row["name"] for row in self._run("PRAGMA table_info(fila)")}
        if columns and not columns >= OLD_COLUMNS:
            raise sqlite3.DatabaseError("its table fila is not a queue of webhooks")
        self._allow_shrinking()
        [[mode]] = self._run("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise sqlite3.OperationalError(
                "no WAL on this disk; NFS and FUSE have none"
            )
        self._run("PRAGMA synchronous = FULL")  # a 200 must survive a power cut
        self._run("PRAGMA secure_delete = ON")  # erased messages are gone from the file
        self._run("PRAGMA journal_size_limit = 16777216")
        with self.transaction() as now:
            self._run(TABLE)
            self._run(EVENTS)
            columns = {row["name"] for row in self._run("PRAGMA table_info(fila)")}
            for name, kind in NEW_COLUMNS.items():
                if name not in columns:
                    self._run(f"ALTER TABLE fila ADD COLUMN {name} {kind}")
            for statement in INDEXES.split(";"):
                self._run(statement)
            self._run(MINUTES_TABLE)
            self._run(PROBLEMS_TABLE)
            self._run(TARGETS_TABLE)
            self._run(FILE_ID_TABLE)
            self._run(NEW_FILE_ID, id=secrets.token_hex(8))
            [[self.file_id]] = self._run(FILE_ID)
            if not self._run("PRAGMA table_info(contadores)"):
                for statement in (COUNTERS_TABLE, COUNT_ALL, *TRIGGERS):
                    self._run(statement)
            for statement in ADOPT:
                self._run(statement, now=now, most=self.most)
            self._run(f"PRAGMA user_version = {self.VERSION}")

    def _allow_shrinking(self):
        """auto_vacuum counts before WAL and before the first table, or with VACUUM."""
        [[vacuum]] = self._run("PRAGMA auto_vacuum")
        if vacuum == 2:
            return
        self._run("PRAGMA auto_vacuum = INCREMENTAL")
        if os.path.getsize(self.path) > self.REBUILT:
            how = f"sqlite3 {self.path} 'PRAGMA auto_vacuum=2; VACUUM'"
            log.warning("this old file will not shrink; stop the service and: %s", how)
        elif self._run("SELECT 1 FROM sqlite_master"):
            self._run("PRAGMA journal_mode = DELETE")
            try:
                self._run("VACUUM")
            except sqlite3.Error as error:  # it needs room for a copy
                log.warning("this old file will not shrink yet: %s", safe_text(error))

    def _run(self, sql, **values):
        """One statement to its end: a half-read RETURNING would not be committed."""
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def transaction(self):
        """All or nothing, as a context manager. Yields the time as text. (A generator
        would be shorter, and a tenth of what a webhook costs.)

        Inside another one it is a savepoint: a request that fails does not spoil its
        neighbours, and all become durable with the outermost COMMIT. IMMEDIATE, since a
        transaction that reads first and writes later is refused when others write.
        """
        return self

    def __enter__(self):
        self._lock.acquire()
        try:
            if not self._marks:
                self._at = self.clock()
                self._now = utc(self._at)
                if self._db.in_transaction:  # a rollback has failed
                    self._db.execute("ROLLBACK")
                self._before = self._db.total_changes
            else:
                self._must_be_open()
            self._db.execute(LEVELS[len(self._marks)][0])
            self._marks.append((len(self._log), len(self._fallen)))
            return self._now
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, failed, *_):
        try:
            logged, fallen = self._marks.pop()
            _, commit, rollback = LEVELS[len(self._marks)]
            try:
                if not failed:
                    if self._marks:
                        self._db.execute(commit)
                    else:
                        self._commit()
            except BaseException:
                failed = True
                raise
            finally:
                if failed:
                    del self._log[logged:], self._fallen[fallen:]
                    self._minute = None
                    if self._db.in_transaction:  # else SQLite has ended it
                        self._db.execute(rollback)
            if self.erased and not self._marks:
                self.erased = not self.checkpoint()
        finally:
            self._lock.release()

    def _must_be_open(self):
        if not self._db.in_transaction:
            raise sqlite3.OperationalError("the outer transaction was rolled back")

    def _commit(self):
        """COMMIT, with what is to be counted, so that both hold or neither. Refusals
        alone are no reason to write: a scanner must not make the disk busy."""
        if self._log:
            self._count(self._waiting)
            self._count({what: self._log.count(what) for what in set(self._log)})
        began = time.perf_counter()
        self._db.execute("COMMIT")
        if self._db.total_changes != self._before:
            self.commits.observe(time.perf_counter() - began)
        if self._log:
            if self._fallen:
                self._tell_dead()
            self._log.clear()
            self._waiting.clear()

    def _count(self, happened):
        """Adds to what stands in the file; after MINUTE has seen what stood there."""
        before, minute = self._db.total_changes, int(self._at // 60)
        if minute != self._minute:
            self._run(MINUTE, minute=minute)
            for step, room in ROOMS.items():
                self._run(OTHER_HOURS, step=step, at=minute // step, room=room)
            self._minute = minute
        for (name, label), n in happened.items():
            self._db.execute(HAPPENED, (name, label, n))
        self._own += self._db.total_changes - before

    def refused(self, reason):
        """Counts a refusal. It becomes durable with what is written next."""
        with self._lock:
            self._waiting["recusadas", reason] += 1

    def write_refusals(self):
        """For when nothing else is written."""
        with self._lock:
            if self._waiting:
                with self.transaction():
                    self._count(self._waiting)
                self._waiting.clear()

    def own_id(self, source, event_id, payload):
        """An event id that nothing vouches for: with a digest of the payload behind it
        where another message has taken it, so that this one is no duplicate of that."""
        if self._run(TAKEN, source=source, event_id=event_id, payload=payload):
            return f"{event_id} {hashlib.sha256(payload).hexdigest()[:16]}"
        return event_id

    def webhook(
        self,
        payload,
        is_text=True,
        source=None,
        event_id=None,
        group_key=None,
        method=None,
        path=None,
        query=None,
        headers=None,
    ):
        """Keeps one message, in bytes; `is_text` where they are UTF-8.

        The others are texts, headers a JSON object. False, and nothing is kept, when
        this source's event is known already.
        """
        sql = WEBHOOK if is_text else WEBHOOK_BYTES
        # one INSERT undoes itself when it fails: inside a transaction it needs no
        # savepoint, which would cost 4 % of a webhook
        with self._lock, JOINED if self._marks else self:
            self._must_be_open()
            if event_id and self._run(SEEN, source=source, event_id=event_id):
                is_new = False
            else:
                values = payload, self._now, len(payload), source, event_id, group_key
                values += method, path, query, headers
                is_new = self._db.execute(sql, values).rowcount > 0
            self._log.append(("recebidas" if is_new else "duplicadas", source or ""))
            return is_new

    def pegar(
        self,
        limit,
        lease,
        max_bytes,
        source=None,
        in_work=None,
        without=(),
        consumer=None,
        after=0,
        fresh=False,
    ):
        """Leases up to `limit` messages, the oldest first, for `lease` seconds.

        Returns their rows. A message with which the batch would pass `max_bytes` of
        payload stays for the next claim, which it opens whatever its size. `source`
        takes only that source's, `without` leaves some out, `in_work` takes no more than
        that so many are leased in all, `after` begins behind an id, and `fresh` takes what
        was never given out. `consumer` is who claims: see lost().
        """
        with self.transaction() as now:
            self._fall_due(now, source)
            if in_work is not None:
                [[busy]] = self._run(IN_WORK, now=now, limit=in_work)
                limit = min(limit, in_work - busy)
            most = 1 if fresh else self.most
            where = {"limit": 2 * limit, "most": most, "after": after}
            rows = self._due(source, without, **where)
            if limit <= 0 or not rows:
                return []
            ids = fitting(*without_poison(rows, limit, self.most), max_bytes)
            return self._lease(ids, lease, now, len(ids), consumer)

    def _due(self, source, without, **where):
        if not without:
            return self._run_of(DUE, source, **where)
        rows = self._run(DUE_PLAIN, **where)
        for name in filter(None, self._others(without)):
            rows += self._run_of(DUE, name, **where)
        return sorted(rows, key=lambda row: row["id"])[: where["limit"]]

    def _others(self, without):
        """Sources of which something is pendente, without some; '' is no source."""
        names = [name for (name,) in self._run(SOURCES)]
        return [name for name in names if name not in without]

    def leave_out(self, is_needed):
        """Makes claims `without` sources possible, which pegar() needs first; or ends
        what that costs."""
        self._run(PLAIN_INDEX if is_needed else NO_PLAIN_INDEX)

    def pegar_conversas(
        self,
        limit,
        lease,
        max_bytes,
        quiet=0,
        longest=0,
        source=None,
        in_work=None,
        single=False,
        without=(),
        consumer=None,
    ):
        """Leases the messages of up to `limit` conversations, the longest waiting first.

        Of those that are `quiet` seconds old or whose first has waited the `longest`;
        never of one of which a message is leased, nor what stands behind one that is
        delayed. Returns (source, key, rows) of each, or with `single` of each the first
        message. The first conversation is cut where it passes `max_bytes` or MANY, the
        others stay for the next claim then. For the rest see pegar().
        """
        with self.transaction() as now:
            self.group()
            self._fall_due(now, source)
            began = time.monotonic()
            while self.gather(self.NEW):
                if time.monotonic() - began > self.PATIENCE:
                    return []  # what it has not seen yet may belong to any of them
            if in_work is not None:
                [[busy]] = self._run(GROUPS_IN_WORK, limit=in_work)
                limit = min(limit, in_work - busy)
            rows = self._candidates(2 * limit, quiet, longest, source, without)
            if limit <= 0 or not rows:
                return []
            last = rows[0]["lost"] > 0 and rows[0]["attempts"] + 1 >= self.most
            rows, limit = without_poison(rows, limit, self.most)
            each = 1 if single or last else self.MANY  # the last time it is alone
            chosen = self._whole(rows, limit, max_bytes, each)
            ids = [id_ for _, _, ids in chosen for id_ in ids]
            rows = self._lease(ids, lease, now, len(chosen), consumer)
            rows = {row["id"]: row for row in rows}
        found = [
            (source, key, [rows[n] for n in ids if n in rows])
            for source, key, ids in chosen
        ]
        return [one for one in found if one[2]]

    def _candidates(self, limit, quiet, longest, source, without):
        """Up to so many conversations that may go out, the longest waiting first."""
        now = self.clock()
        times = {"waited": utc(now - longest), "quiet": utc(now - quiet)}
        times["soon"] = utc(now + 60)
        found = {}
        sources = self._others(without) if without else [source]
        for sql, name in itertools.product((WAITED, QUIET, SET_BACK), sources):
            for row in self._run_of(sql, name, limit=limit, **times):
                found[row["source"], row["group_key"]] = row
        return sorted(found.values(), key=lambda row: row["first"])

    def _whole(self, conversations, limit, max_bytes, each):
        """(source, key, ids) of conversations that fit; of each up to so many messages.

        The first is cut when it does not fit. The others are passed over, and one of
        them is the first of a claim to come; but few where all are long, since each
        that is looked at takes its time.
        """
        chosen, room, look = [], self.MANY, 2 * self.MANY
        for found in conversations:
            source, key = found["source"], found["group_key"]
            rows = self._run(
                OF_GROUP, source=source, group_key=key, limit=each, most=self.most
            )
            look -= len(rows)
            sizes = list(itertools.accumulate(row["size"] or 0 for row in rows))
            fit = sum(size <= max_bytes for size in sizes[:room])
            if not chosen:
                fit = max(fit, min(len(rows), 1))
            if fit and (fit == len(rows) or not chosen):
                key = key if isinstance(key, str) else None
                chosen.append((source or None, key, [row["id"] for row in rows[:fit]]))
                room, max_bytes = room - fit, max_bytes - sizes[fit - 1]
            if len(chosen) == limit or min(room, max_bytes, look) <= 0:
                break
        return chosen

    def _fall_due(self, now, source):
        """Ends leases and delays that are over."""
        self.lease_ended()
        delayed = self._run_of(DELAYS_OVER, source, now=now, limit=self.BITE[0])
        if delayed:
            self._run(DELAY_ENDED, ids=json.dumps(fitting(delayed, *self.BITE)))

    def _lease(self, ids, lease, now, claim, consumer):
        until = utc(math.ceil(self.clock() + lease))
        values = {"ids": json.dumps(ids), "now": now, "until": until, "claim": claim}
        values.update(told=self._line("pegar", consumer), consumer=consumer)
        try:
            with self.transaction():
                rows = self._run(PEGAR, **values)
        except MemoryError:
            rows = self._lease_some(ids, values)
        self._log += [("entregues", "")] * len(rows)
        return sorted(rows, key=lambda row: row["id"])  # RETURNING has no order

    def _lease_some(self, ids, values):
        """As many as the memory takes; what it does not take even alone goes to erro."""
        rows = []
        for id_ in ids:
            values["ids"] = json.dumps([id_])
            try:
                with self.transaction():
                    rows += self._run(PEGAR, **values)
            except MemoryError:
                if rows:
                    break
                self.erro([id_], reason="não cabe na memória")
        return rows

    def _line(self, what, text=None):
        text = " ".join((text or "").split())[:80]
        return f"{int(self._at)} {what} {text}\n"

    def group(self):
        """Makes the file ready for conversations."""
        if not self._run(IS_GROUPED):
            with self.transaction():
                for statement in GROUPS:
                    self._run(statement)

    def gather(self, limit):
        """Sorts up to `limit` messages that are new or have changed into their
        conversations; whether there may be more."""
        if not self._run(IS_GROUPED):
            return False
        with self.transaction():
            [[last]] = self._run(LAST_READ)
            new = self.list(("pendente", "processando"), after=last, limit=limit)
            if new:
                self._run(READ[0], ids=json.dumps([row["id"] for row in new]))
                self._run(READ[1], last=new[-1]["id"])
            [[count, last]] = self._run(LAST_CHANGED, limit=limit)
            for statement in GATHER if count else ():
                self._run(statement, last=last)
            return limit in (len(new), count)

    def lease_ended(self):
        """Ends leases that ran out, the oldest first: back to the queue, or to erro when
        the attempts are used up. How many there were, up to BITE."""
        with self.transaction() as now:
            return self._end(LEASES_OVER, "prazo", now=now)

    def lost(self, consumer):
        """Ends what a consumer holds: one that claims again, or starts again, has lost
        what it had not settled. How many there were, up to BITE."""
        with self.transaction():
            return self._end(HELD, "perdida", consumer=consumer)

    def _end(self, sql, why, **where):
        rows = self._run(sql, limit=self.BITE[0], **where)
        values = {"ids": json.dumps(fitting(rows, *self.BITE)), "most": self.most}
        values["told"] = self._line(why)
        ended = self._run(LEASE_ENDED, now=self._now, **values)
        self._log += [("vencidas", "")] * len(ended)
        self._count_used_up(row["status"] for row in ended)
        self._count_dead(ended)
        return len(ended)

    def _count_used_up(self, statuses):
        self._log += [("esgotadas", "")] * list(statuses).count("erro")

    def _count_dead(self, rows):
        self._fallen += [row["reason"] for row in rows if row["status"] == "erro"]

    def _tell_dead(self):
        """After the commit: what was rolled back has not gone to erro."""
        for reason in self._fallen:
            reason = (reason or "no reason given")[:100]
            full = len(self._dead) >= self.REASONS and reason not in self._dead
            self._dead["other reasons" if full else reason] += 1
        self._fallen.clear()
        count = self._log.count(("esgotadas", ""))
        if count:
            text = "messages have used up their attempts, see erro"
            self.used_up("esgotadas", text, times=count)

    def dead(self, told=None):
        """How many have gone to erro here, a Counter by reasons, cut to 100 characters.

        What was `told` of them is not counted any more.
        """
        with self._lock:
            self._dead -= told or collections.Counter()
            return self._dead.copy()

    def processado(self, ids, attempt=None):
        """Done. Like the other verdicts it takes ids and perhaps the attempt that is
        settled, and returns {id: Outcome}."""
        return self._settle("processado", PROCESSADO, ids, attempt, "processado")

    def erro(self, ids, attempt=None, reason=None):
        """Failed for good."""
        return self._settle("erro", ERRO, ids, attempt, "erro", reason=reason)

    def devolver(self, ids, attempt=None, reason=None, delay=None, spared=False):
        """Failed for now: again after `delay` seconds, or after the backoff. Where the
        attempt is `spared`, it does not count."""
        most = 10**9 if spared else self.most
        values = {"most": most, "backoff": self.backoff, "reason": reason}
        values.update(delay=delay, epoch=math.ceil(self.clock()), spared=spared)
        outcomes = {}
        with self.transaction():
            for part, tries in self._together(ids) if delay is None else [(ids, None)]:
                values["tries"] = tries
                values["jitter"] = None if tries is None else secrets.randbelow(41)
                outcomes |= self._settle(
                    "devolver", DEVOLVER, part, attempt, "pendente", **values
                )
            self._count_used_up(o.status for o in outcomes.values() if not o.refused)
        return outcomes

    def antecipar(self, ids, attempt=None, **values):
        """devolver() without a delay, which also makes due at once what is delayed."""
        with self.transaction():
            self._settle("devolver", ANTECIPAR, ids, attempt, "pendente")
            return self.devolver(ids, attempt, **values)

    def _together(self, ids):
        """(ids, attempts for the backoff) of what should come back at the same time: a
        conversation that was handed out as one must not come back in pieces."""
        rows = self._run(TOGETHER, ids=json.dumps(ids)) if len(ids) > 1 else ()
        parts = [(json.loads(row["ids"]), row["tries"]) for row in rows]
        alone = set(ids).difference(*(part for part, _ in parts))
        return [*parts, ([id_ for id_ in ids if id_ in alone], None)]

    def estender(self, ids, attempt=None, lease=600):
        """Still at work: the lease runs `lease` seconds from now."""
        until = utc(math.ceil(self.clock() + lease))
        return self._settle("estender", ESTENDER, ids, attempt, None, until=until)

    def reenviar(self, ids, attempt=None):
        """Once more from the start."""
        return self._settle("reenviar", REENVIAR, ids, attempt, "pendente")

    def _settle(self, verdict, sql, ids, attempt, already, **values):
        """`already` is the status on which the verdict changes nothing and is good."""
        with self.transaction() as now:
            values.update(ids=json.dumps(ids), attempt=attempt, now=now)
            values["told"] = self._line(verdict, values.get("reason"))
            changed = self._run(sql, **values)
            self._log += [("resolvidas", verdict)] * len(changed)
            self._count_dead(changed)
            settled = {row["id"]: row["status"] for row in changed}
            rest = json.dumps([id_ for id_ in ids if id_ not in settled])
            known = {row["id"]: row for row in self._run(STATUS, ids=rest)}
        outcomes = {id_: Outcome(None, status) for id_, status in settled.items()}
        for id_, row in known.items():
            refused = None if row["status"] == already else "conflict"
            if attempt not in (None, row["attempts"]):
                refused = "superseded"
            outcomes[id_] = Outcome(refused, row["status"], row["attempts"])
        return {id_: outcomes.get(id_, Outcome("unknown", None)) for id_ in ids}

    def list(self, statuses, limit=50, newest=False, **where):
        """Rows (id, size) of messages with one of the statuses, in the order of ids or
        with the newest first.

        Of a `source`; with ids `after` one, and up to `until`; `delayed` ones only;
        failed for exactly this `reason`, "" for none, or for one of several.
        """
        found = []
        for sql, values in self._lists(statuses, limit=limit, **where):
            sql = NEWEST[sql] if newest else sql
            found += self._run_of(sql, **values)
        return sorted(found, key=lambda row: row["id"], reverse=newest)[:limit]

    def count(self, statuses, limit, **where):
        """(how many messages list() would give, the highest of their ids)."""
        found = [
            self._run_of(COUNT[sql], **values)[0]
            for sql, values in self._lists(statuses, limit=limit, **where)
        ]
        return sum(n for n, _ in found), max(last or 0 for _, last in found)

    def _lists(
        self,
        statuses,
        source=None,
        after=0,
        until=2**63 - 1,
        reason=None,
        delayed=False,
        **values,
    ):
        """(statement, values) of each part of a list. Both lists of pendente are long."""
        values.update(source=source, after=after, until=until)
        if isinstance(reason, str):
            yield LIST_REASON, {"reason": reason, **values}
        elif reason is not None:
            yield LIST_REASONS, {"reason": json.dumps(reason), **values}
        else:
            for status in statuses:
                if not delayed:
                    yield LIST, {"status": status, **values}
                if status == "pendente":
                    yield LIST_DELAYED, {"status": status, **values}

    def search(self, fits, statuses, seconds, limit, until=2**63 - 1, **where):
        """(rows (id, size) of the newest messages of list() of which fits(row) is true,
        the id up to which to go on or None), after about so many seconds at most."""
        found, end = [], time.monotonic() + seconds
        while True:
            rows = self.list(statuses, self.SLICE, newest=True, until=until, **where)
            sizes = itertools.accumulate(row["size"] or 0 for row in rows)
            fit = max(1, sum(size <= self.SLICE_BYTES for size in sizes))
            ids = [row["id"] for row in rows[:fit]]
            if not ids:
                return found, None
            found += filter(fits, self._run(SEARCHED, ids=json.dumps(ids)))
            until = ids[-1] - 1
            if len(found) >= limit or time.monotonic() >= end:
                break
        if len(found) > limit:
            until = found[limit - 1]["id"] - 1
        return found[:limit], until

    def last_before(self, moment):
        """The last id that came before a time, as it is in the file. Ids grow with time
        but where the clock was set back."""
        low, [[high]] = 0, self._run(LAST_ID)
        while low < high:
            middle = (low + high + 1) // 2
            [row] = self._run(CAME, id=middle)
            if row["created_at"] < moment:
                low = row["id"]
            else:
                high = middle - 1
        return low

    def evento(self, event_id, source=None):
        """Rows (id, size) of the messages, one of a source, that have this event id."""
        rows = self._run(EVENTO, event=event_id, source=source)
        return sorted(rows, key=lambda row: row["id"])

    def motivos(self, source=None, reason=None, limit=50, after=0, until=2**63 - 1):
        """Rows (reason, count, until), the commonest first, of the messages in erro; or
        of one `reason` as in list(). `until` is the last id that was counted."""
        where = {"source": source, "limit": limit, "after": after, "until": until}
        if reason is None:
            return self._run(MOTIVOS, **where)
        return self._run(MOTIVO, reason=reason, **where)

    def reasons(self):
        """All there are, each once."""
        return [reason for (reason,) in self._run(REASONS)]

    def _run_of(self, sql, source, **values):
        """A statement for all or for one source."""
        if source is None or sql not in OF_SOURCE:
            return self._run(sql, source=source, **values)
        return self._run(OF_SOURCE[sql], source=source, **values)

    def look(self, ids, whole):
        """Rows of messages as they are; of the payload the first 2 kB unless `whole`.

        One by one, because 500 whole messages could be more than the memory.
        """
        for id_ in ids:
            yield from self._run(LOOK if whole else LOOK_SHORT, id=id_)

    def look_through(self, rows):
        """look() for a list, with rows (id, size). SQLite reads a payload to its end to
        give its start: of long ones, and behind 4 MiB of all, it is left out."""
        read = 0
        for row in rows:
            size = row["size"] or 0
            read += size
            is_read = size <= self.GLANCE and read <= 4 * self.GLANCE
            yield from self._run(LOOK_SHORT if is_read else LOOK_WITHOUT, id=row["id"])
            read -= 0 if is_read else size

    def delete(self, id_):
        """Erases a message and its bytes; whether there was one."""
        with self.transaction():
            found = self._delete([id_])
            if found:
                self.erased = True
                self.gather(self.NEW)  # its conversation may be a phone number
            return found > 0

    def apagar(self, ids):
        """Erases many."""
        with self.transaction():
            self.erased = self._delete(ids) > 0 or self.erased
            self.gather(self.NEW)

    def _delete(self, ids):
        ids = json.dumps(ids)
        self._run(REMEMBER, ids=ids)
        return len(self._run(DELETE, ids=ids))

    def oldest_due(self):
        """Seconds since the oldest message that is due came, or its delay or lease ended;
        None when none is."""
        epoch = int(self.clock())
        [[age]] = self._run(OLDEST_DUE, epoch=epoch, now=utc(epoch))
        return age if age is None else max(0, age)

    def oldest_open(self):
        """Seconds since the oldest message that is not settled came; None without one."""
        [[age]] = self._run(OLDEST_OPEN, epoch=int(self.clock()))
        return age if age is None else max(0, age)

    def totals(self):
        """{name: number} of what COUNTED has, over all labels."""
        return dict(self._run(TOTALS))

    def arrivals(self):
        """A number that has grown when a message was kept, by whatever process."""
        [[number]] = self._run(ARRIVALS)
        return number

    def pending(self):
        """How many messages wait or are in work."""
        [[count]] = self._run(PENDING)
        return count

    def free(self):
        """Bytes that the file's disk still takes."""
        return shutil.disk_usage(self.path).free

    def changes(self):
        """A number that has grown when something was changed through this connection."""
        return self._db.total_changes - self._own

    def report(self):
        """What there is to see, without counting rows: see README, "Running it".

        Read in a moment, also from a file that another process is writing to.
        """
        with self._lock:
            epoch = int(self.clock())
            counted = {name: {} for name in (*STATUSES, *COUNTERS)}
            for name, label, n in self._run(COUNTED):
                counted.setdefault(name, {})[label] = n
            for (name, label), n in self._waiting.items():
                counted[name][label] = counted[name].get(label, 0) + n
            return {
                "mensagens": [
                    {"fonte": source or None, "status": status, "quantidade": n}
                    for status in STATUSES
                    for source, n in counted[status].items()
                ],
                "mais_antiga": self.oldest_due(),
                "nao_resolvida": self.oldest_open(),
                "adiadas": self._run(DELAYED, limit=self.COUNTED)[0][0],
                "conversas": self._conversations(epoch),
                "por_minuto": self.history(1),
                "contadores": {name: counted[name] for name in COUNTERS},
                "arquivo": os.path.getsize(self.path),
                "wal": size_of(f"{self.path}-wal"),
                "livre": self.free(),
            }

    def _conversations(self, epoch):
        """How many wait, for how long the first, and how many are in work; None where
        nobody asks for conversations."""
        if not self._run(IS_GROUPED):
            return None
        limit = self.COUNTED
        [[waiting, age]] = self._run(GROUPS_WAITING, limit=limit, epoch=epoch)
        [[working]] = self._run(GROUPS_IN_WORK, limit=limit)
        return {"esperando": waiting, "mais_antiga": age, "em_trabalho": working}

    def history(self, step):
        """[seconds since the epoch, received, done, failed] of each of the last steps, of
        so many minutes (see ROOMS)."""
        before = [*self._run(HISTORY, step=step), *self._run(SO_FAR)]
        names = ("received", "done", "failed")
        found = {
            this["at"]: [after[name] - this[name] for name in names]
            for this, after in itertools.pairwise(before)
        }
        now = int(self.clock() // 60) // step
        steps = range(now - ROOMS[step] + 1, now + 1)
        return [[60 * step * at, *found.get(at, (0, 0, 0))] for at in steps]

    def targets(self):
        """{name: what keep_target() was given last}"""
        return {name: json.loads(facts) for name, facts in self._run(TARGETS)}

    def keep_target(self, name, facts):
        self._run(TARGET, name=name, facts=json.dumps(facts))

    def waiting(self, source=None, without=()):
        """(how many messages wait, seconds since the first came or None) of one source, or
        of all but some. The age is of them all where a source is left out."""
        count = sum(
            n
            for name, label, n in self._run(COUNTED)
            if name == "pendente" and label not in without and source in (None, label)
        )
        first = self.list(["pendente"], limit=1, source=source) if count else ()
        for row in self.look([row["id"] for row in first], whole=False):
            came = datetime.datetime.fromisoformat(f"{row['created_at']}+00:00")
            return count, max(0, int(self.clock() - came.timestamp()))
        return count, None

    def problems(self):
        """Rows (kind, name, since, seen, text) of what was wrong when write_problems()
        was last called; times in seconds since the epoch."""
        return self._run(PROBLEMS)

    def write_problems(self, rows):
        with self.transaction():
            self._run("DELETE FROM problemas")
            self._db.executemany(PROBLEM, rows)

    def probe(self):
        """Writes a little, to learn whether the file and its disk take it."""
        with self.transaction():
            self._run(f"PRAGMA user_version = {self.VERSION}")

    def shift(self, step):
        """Moves leases and delays along when the clock was set `step` seconds on."""
        with self.transaction():
            for statement in SHIFT:
                self._run(statement, step=f"{step:+.0f} seconds")

    def purge(self, days, limit):
        """Deletes up to `limit` messages settled over `days` ago; how many it did.

        They have at most 4 MiB together, since secure_delete writes over all of it.
        """
        with self.transaction():
            before = utc(self.clock() - days * 86400)
            ids = fitting(self._run(OLD, before=before, limit=limit), limit, 4 << 20)
            deleted = self._delete(ids)
            self._log += [("apagadas", "")] * deleted
            return deleted

    def forget(self, days, limit):
        """Forgets event ids seen over `days` ago, of the `limit` oldest; how many."""
        with self.transaction():
            before = utc(self.clock() - days * 86400)
            return len(self._run(FORGET, before=before, limit=limit))

    def shrink(self, pages):
        """Gives up to `pages` free pages back to the disk; whether more may follow."""
        with self._lock:
            [[before]] = self._run("PRAGMA freelist_count")
            if before:  # execute() would step this pragma once, which frees one page
                self._db.executescript(f"PRAGMA incremental_vacuum({pages})")
            [[after]] = self._run("PRAGMA freelist_count")
            return 0 < after < before

    def checkpoint(self):
        """Empties the WAL into the database, unless that means waiting for a reader;
        whether it could."""
        with self._lock:
            self._run("PRAGMA busy_timeout = 0")
            try:
                [[busy, *_]] = self._run("PRAGMA wal_checkpoint(TRUNCATE)")
                return not busy
            except sqlite3.OperationalError as error:
                log.debug("no checkpoint now: %s", error)
                return False
            finally:
                self._run(f"PRAGMA busy_timeout = {self.BUSY * 1000}")

    def close(self):
        """Leaves one tidy file behind."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self.write_refusals()
                self.checkpoint()
            self._db.close()


class ReadOnlyStore(Store):
    """The file as it stands, for looking and copying while the service runs or not."""

    def __init__(self, path, clock=time.time):
        """StartError when there is no file that the service has opened."""
        self.path, self.clock = os.path.abspath(path), clock
        self._lock, self._waiting = threading.RLock(), {}
        where = f"file:{urllib.parse.quote(self.path)}?mode=ro"
        try:
            os.stat(self.path)
            options = {"uri": True, "isolation_level": None}
            self._db = sqlite3.connect(where, timeout=self.BUSY, **options)
            self._db.row_factory = sqlite3.Row
            self._db.text_factory = text_of
            self._run("PRAGMA schema_version")
        except (sqlite3.Error, OSError) as error:
            raise StartError(f"DB_PATH={path!r} cannot be read: {error}") from error

    def report(self):
        if not self._run("PRAGMA table_info(contadores)"):
            raise StartError(f"{self.path}: no buffer.py that counts has opened it yet")
        return super().report()

    def backup(self, path, progress=None):
        """Copies all of it to an empty file and checks the copy.

        From one snapshot, which a read transaction holds: without it every commit of the
        service would start the copy anew. Writers do not wait for it, but the WAL grows
        meanwhile.
        """
        with self._lock, contextlib.closing(sqlite3.connect(path)) as copy:
            copy.execute("PRAGMA synchronous = OFF")  # the caller syncs once
            self._run("BEGIN")
            self._run("SELECT 1 FROM sqlite_master")
            self._db.backup(copy, pages=1000, progress=progress)
            self._run("COMMIT")
            copy.execute("PRAGMA journal_mode = DELETE")  # no -wal beside it, one file
            found = [row[0] for row in copy.execute("PRAGMA integrity_check")]
        if found != ["ok"]:
            raise sqlite3.DatabaseError(f"the copy is damaged: {found[0]}")

    def close(self):
        self._db.close()


# Signatures

# Preset, then HEADER TEMPLATE ID as SIGN_<FONTE> takes them; from the documentation that
# each provider publishes of its webhooks. README says where the secrets are found.
PRESETS = """
generic          X-Signature {body} $.id
github           X-Hub-Signature-256 {body} X-GitHub-Delivery
meta             X-Hub-Signature-256 {body} -
stripe           Stripe-Signature {t}.{body} $.id
standardwebhooks webhook-signature {h:webhook-id}.{t:webhook-timestamp}.{body} webhook-id
svix             svix-signature {h:svix-id}.{t:svix-timestamp}.{body} svix-id
slack            X-Slack-Signature v0:{t:X-Slack-Request-Timestamp}:{body} $.event_id
shopify          X-Shopify-Hmac-Sha256 {body} X-Shopify-Webhook-Id
woocommerce      X-WC-Webhook-Signature {body} -
mercadopago      x-signature [id:{q:data.id};][request-id:{h:x-request-id};]ts:{t};||[id:{q:data.id:lower};][request-id:{h:x-request-id};]ts:{t}; $.id
twilio           X-Twilio-Signature sha1:{url}{form} I-Twilio-Idempotency-Token
telegram         X-Telegram-Bot-Api-Secret-Token - $.update_id
gitlab           X-Gitlab-Token - Idempotency-Key
asaas            asaas-access-token - $.id
hotmart          X-Hotmart-Hottok - $.id
chatwoot         X-Chatwoot-Signature {t:X-Chatwoot-Timestamp}.{body} X-Chatwoot-Delivery
typeform         Typeform-Signature {body} $.event_id
paddle           Paddle-Signature {t}:{body} $.event_id
calendly         Calendly-Webhook-Signature {t}.{body} -
square           x-square-hmacsha256-signature {url}{body} $.event_id
hubspot          X-HubSpot-Signature-v3 {method}{url}{body}{t:X-HubSpot-Request-Timestamp} -
zoom             x-zm-signature v0:{t:x-zm-request-timestamp}:{body} -
razorpay         X-Razorpay-Signature {body} X-Razorpay-Event-Id
linear           Linear-Signature {body} Linear-Delivery
notion           X-Notion-Signature {body} $.id
"""
PRESETS = dict(line.split(maxsplit=1) for line in PRESETS.strip().splitlines())

# Where a preset has the time of sending in the body that it signs.
BODY_TIMES = {"linear": "$.webhookTimestamp"}

FIELD = re.compile(
    r"\{(body|t|t:[\w-]+|h:[\w-]+|q:[\w.-]+?(?::lower)?|url|method|form)\}", re.ASCII
)
PART = re.compile(r"\[([^][]+)\]|([^][]+)")  # what may be missing, and what may not
MAC = re.compile("[A-Za-z0-9+/]{26,}={0,2}")  # hex or base64; no label is so long


class BadSignature(Exception):
    """Its text is the reason that is counted: assinatura, relogio or token."""


class Source:
    """A sender that signs, or without a secret one that has a name only.

    Of a request it needs method, target (path and query as they came), query,
    header(name), in_query(name), and raw, the bytes of the body as they came.
    """

    def __init__(self, name, settings, public_url):
        """`settings` is a SourceSettings; StartError when it makes no sense."""
        self.name = name.lower().replace("_", "-")
        self.group_key, self.signs = settings.group_key, settings.secret is not None
        if self.signs:
            self.read_scheme(name, settings, public_url)

    def read_scheme(self, name, settings, public_url):
        self.public_url, self.tolerance = public_url, settings.tolerance
        self.secrets = [settings.secret, settings.secret_old or settings.secret]
        self.preset = settings.sign or (
            self.name if self.name in PRESETS else "generic"
        )
        words = PRESETS.get(self.preset, self.preset).split()
        try:
            header, template, self.id_word = words
            self.header = matched(r"(\?(?!token$)[\w.-]+|[\w-]+)", header)[0]
            matched(ID_WORD, self.id_word)
            parts = [] if template == "-" else template.split("||")
            self.templates = [compiled(part, self.secrets) for part in parts]
        except ValueError as error:
            known = ", ".join(PRESETS)
            raise StartError(
                f"SIGN_{name}={settings.sign!r}: {error}. It takes three words, HEADER "
                f"TEMPLATE ID, or one of {known}",
                2,
            ) from None
        # an id that anybody can change must not pass for another message's
        in_body = "{body}" in template or "{form}" in template
        is_signed = f"{{h:{self.id_word}}}" in template
        self.signs_id = not parts or (
            in_body if self.id_word.startswith("$") else is_signed
        )
        if "{url}" in template and not public_url:
            raise StartError(f"SIGN_{name} signs the URL, so PUBLIC_URL is needed", 2)

    def verify(self, request, now):
        """BadSignature unless the request is genuine; `now` in seconds."""
        given = self.given(request)
        if not self.templates:
            token = given.encode("latin-1", "replace")
            if sum(hmac.compare_digest(token, key) for key in self.secrets) == 0:
                raise BadSignature("token")
            return
        macs = macs_in(given)
        for hashes, parts in self.templates if macs else ():
            pieces, stamps = self.message(parts, request, given)
            if pieces is not None and is_signed(hashes, pieces, macs):
                if self.preset in BODY_TIMES:
                    found = find_word(BODY_TIMES[self.preset], request) or ""
                    stamps += map(int, re.findall("^[0-9]{1,15}$", found))
                if not all(self.fresh(stamp, now) for stamp in stamps):
                    raise BadSignature("relogio")
                return
        raise BadSignature("assinatura")

    def given(self, request):
        """The signature or token as it came, as latin-1 text."""
        if self.header.startswith("?"):
            return (request.in_query(self.header[1:]) or b"").decode("latin-1")
        return request.header(self.header) or ""

    def fresh(self, stamp, now):
        seconds = stamp / 1000 if stamp > 1e11 else stamp
        return self.tolerance == 0 or abs(now - seconds) <= self.tolerance

    def message(self, parts, request, given):
        """(pieces of what was signed, the times in it); the first is None when
        something is missing that may not be."""
        message, stamps = [], []
        for optional, pieces in parts:
            values, following = [], [*pieces[1:], (None, b"")]
            for (kind, piece), (after, text) in zip(pieces, following):
                value = VALUES[kind](self, request, piece, given) if kind else piece
                if value is None and not optional:
                    return None, stamps
                if (
                    value
                    and kind in ("h", "q")
                    and not after
                    and text
                    and text in value
                ):
                    return None, stamps  # the same text could be cut in another place
                values.append(value)
                if kind == "t" and value:
                    stamps.append(int(value))
            message += [] if None in values else values
        return message, stamps


def compiled(template, secrets):
    """(prepared hashes, parts) of 'sha1:a{t}[b]'; a part is (optional, pieces), a piece
    (None, bytes) or (kind of field, its name). ValueError when it cannot be read."""
    algorithm = "sha1" if template.startswith("sha1:") else "sha256"
    text, parts = template.removeprefix("sha1:"), []
    wrong = PART.sub("", text) or re.match(r"(?i)(sha|md)\d+:", text) or "|" in text
    for optional, required in PART.findall(text):
        pieces = []
        for n, piece in enumerate(FIELD.split(optional or required)):
            kind, _, name = (
                piece.partition(":") if n % 2 else (None, "", piece.encode())
            )
            wrong = wrong or (not kind and re.search("[{}]", piece))
            wrong = wrong or (kind == "t" and optional)  # who leaves it out replays
            pieces += [(kind, name)] if piece else []
        parts.append((bool(optional), pieces))
    if wrong or not FIELD.search(text):  # a constant would have one MAC for all
        raise ValueError(f"{template!r} cannot be read")
    keys = dict.fromkeys(key for secret in secrets for key in keys_of(secret))
    return [hmac.new(key, digestmod=algorithm) for key in keys], parts


def keys_of(secret):
    """Stripe's key is the text whsec_..., Standard Webhooks' the base64 in it."""
    yield secret
    if secret.startswith(b"whsec_"):
        with contextlib.suppress(ValueError):
            decoded = base64.b64decode(secret[len(b"whsec_") :], validate=True)
            yield decoded or secret


def macs_in(text):
    """The MACs that a header holds, as bytes."""
    macs = []
    for run in MAC.findall(text):
        try:
            is_hex = len(run) in (40, 64)
            macs.append(bytes.fromhex(run) if is_hex else base64.b64decode(run))
        except ValueError:
            continue  # neither hex nor base64
    return macs


def is_signed(hashes, pieces, macs):
    good = False
    for prepared in hashes:
        found = prepared.copy()
        for piece in pieces:
            found.update(piece)
        digest = found.digest()
        for mac in macs:
            good |= hmac.compare_digest(digest, mac)
    return good


def signed_time(source, request, name, given):
    text = request.header(name) if name else given
    pattern = "^([0-9]{1,15})$" if name else r"\bts?=([0-9]{1,15})\b"
    found = re.search(pattern, text or "", re.ASCII)
    return found and found[1].encode()


def signed_header(source, request, name, given):
    text = request.header(name)
    return text.encode("latin-1") if text else None


def signed_query(source, request, name, given):
    name, lower, _ = name.partition(":lower")
    text, *more = request.query.get(name, [""])
    if more:  # which of them is signed, and which is read?
        raise BadSignature("assinatura")
    return (text.lower() if lower else text).encode(errors="surrogateescape") or None


def signed_form(source, request, name, given):
    """Twilio's: keys and values, sorted; for other bodies a hash stands in the URL."""
    digest = request.query.get("bodySHA256", [""])[0].encode(errors="replace")
    if digest:
        found = hashlib.sha256(request.raw).hexdigest().encode()
        return b"" if hmac.compare_digest(digest, found) else None
    options = {"keep_blank_values": True, "max_num_fields": FIELDS}
    if len(request.raw) > 1 << 20:
        return None
    try:
        pairs = urllib.parse.parse_qsl(request.raw.decode(), **options)
    except ValueError:
        return None
    return "".join(key + value for key, value in sorted(set(pairs))).encode()


# The fields of a template: kind -> bytes, or None when it is missing.
VALUES = {
    "t": signed_time,
    "h": signed_header,
    "q": signed_query,
    "form": signed_form,
    "body": lambda source, request, name, given: request.raw,
    "method": lambda source, request, name, given: request.method.encode("latin-1"),
    "url": lambda source, request, name, given: (
        source.public_url + request.target
    ).encode("latin-1"),
}


def find_id(words, request):
    """The id that ID words lead to, joined by commas; None when a part is absent."""
    found = [find_word(word, request) for word in words]
    if len(found) > 1:  # else ("a,b", "c") and ("a", "b,c") were one
        found = [part and re.sub(r"([\\,])", r"\\\1", part) for part in found]
    return identifier(",".join(found) if all(found) else "")


def find_first(words, request):
    """What the first of the ID words leads to that is there; or None."""
    for word in words:
        found = identifier(find_word(word, request) or "")
        if found:
            return found
    return None


def identifier(text):
    if not text.isascii():  # half a surrogate
        text = text.encode("utf-8", "backslashreplace").decode()
    return text if 0 < len(text) <= 500 else None  # a longer one identifies nothing


def find_word(word, request):
    """A header's value, or a string or whole number in the JSON, as text; or None."""
    if not word.startswith("$"):
        return request.header(word)
    value = request.json
    for step in word.split(".")[1:]:
        try:
            value = value[int(step) if isinstance(value, list) else step]
        except (LookupError, TypeError, ValueError):
            return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


# The page

# A browser must not keep what it shows, nor take it for something else.
PRIVATE = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))

# What the page says: key, English, Portuguese.
PAGE_WORDS = """
leave = Log out = Sair
enter = Log in = Entrar
token = Token = Token
token which = The TOKEN that the service was started with; WEBHOOK_TOKEN is not enough. = O TOKEN com que o serviço foi iniciado; WEBHOOK_TOKEN não basta.
remember = Keep it on this device = Guardar neste aparelho
as of = as of {time} = às {time}
dismiss = Dismiss = Dispensar
all well = All is well = Tudo em ordem
problem = 1 problem = 1 problema
problems = {n} problems = {n} problemas
no data yet = Loading … = Carregando …
since = since {time} ({age}) = desde {time} ({age})
problem destino = {target} takes no messages: {error}. {waiting} wait, next try: {next}. = {target} não recebe mensagens: {error}. {waiting} esperam, próxima tentativa: {next}.
problem file = Senders get 503: the file at DB_PATH was removed or replaced; the log says how to save the open one. = Remetentes recebem 503: o arquivo em DB_PATH foi removido ou trocado; o log diz como salvar o que está aberto.
problem disk = Senders get 503: the disk has {free} free, MIN_FREE is {limit}. = Remetentes recebem 503: o disco tem {free} livres, MIN_FREE é {limit}.
problem queue = Senders get 503: {messages} in the queue, MAX_PENDING is {limit}. = Remetentes recebem 503: {messages} na fila, MAX_PENDING é {limit}.
problem recusas = Senders were refused {messages} times in five minutes: {reasons}. = Remetentes recusados {messages} vezes em cinco minutos: {reasons}.
problem erro = {lying} messages have failed and wait for a person. = {lying} mensagens falharam e esperam uma pessoa.
problem age = The oldest message that is due has waited for {seconds}. = A mensagem mais antiga da vez espera há {seconds}.
problem consumo = Nobody has fetched messages for {seconds}; {messages} wait. = Ninguém busca mensagens há {seconds}; {messages} esperam.
problem silence = No message has come for {seconds}. = Nenhuma mensagem chegou há {seconds}.
show = Show = Mostrar
try now = Try now = Tentar agora
pause = Pause = Pausar
resume = Resume = Retomar
queue = Queue = Fila
delivery = Delivery = Entrega
history = Received, done, failed = Recebidas, processadas, erros
hora = Hour = Hora
dia = Day = Dia
semana = Week = Semana
list it = List these = Listar estas
received = received = recebidas
done = done = processadas
failed = failed = erros
pick a time = Time in the chart; Enter lists it = Momento no gráfico; Enter lista
rates = {in}/min in, {out}/min out = {in}/min entram, {out}/min saem
empty in = empty in {time} = vazia em {time}
grows = grows by {n}/min = cresce {n}/min
steady = stays as long = estável
oldest = the oldest came {age} ago = a mais antiga chegou há {age}
delayed = delayed = adiadas
all = all = todas
machine = Machine and version = Máquina e versão
disk = Free on the disk = Livre no disco
database = Database + WAL = Banco + WAL
version = Version = Versão
conversations = Conversations = Conversas
talks = {n} waiting, the oldest {age}; {m} in work = {n} esperando, a mais antiga {age}; {m} em trabalho
first = Give this URL to your senders = Dê esta URL aos seus remetentes
first how = with your TOKEN, or better WEBHOOK_TOKEN, behind it. The first message will show here by itself. = com o seu TOKEN, ou melhor WEBHOOK_TOKEN, no fim. A primeira mensagem aparece aqui sozinha.
your token = YOUR_TOKEN = SEU_TOKEN
reasons = Why they failed = Por que falharam
more reasons = {n} more = mais {n}
messages = Messages = Mensagens
list = List = Lista
source = Source = Fonte
period = Period = Período
any time = any time = qualquer hora
last 900 = last 15 minutes = últimos 15 minutos
last 3600 = last hour = última hora
last 86400 = last day = último dia
last 604800 = last week = última semana
find = Id, event, number, name, text … = Id, evento, telefone, nome, texto …
search = Search = Buscar
searching = Searching, from {time} back … = Buscando, de {time} para trás …
none = No messages. = Nenhuma mensagem.
newer = Newer = Mais novas
older = Older = Mais antigas
new ones = {n} new ▲ = {n} novas ▲
changed = Show changes ▲ = Mostrar mudanças ▲
choose all = Choose all that are shown = Escolher todas as mostradas
choose = Choose message {id} = Escolher mensagem {id}
chosen = {n} chosen: = {n} escolhidas:
these = All of these: = Todas estas:
without filter = Remove {what} = Tirar {what}
pendente = pending = pendente
processando = in work = processando
processado = done = processado
erro = failed = erro
until = until {time} = até {time}
message = message = mensagem
of messages = messages = mensagens
message n = Message {id}: {status} = Mensagem {id}: {status}
close = Close = Fechar
payload = Payload = Conteúdo
headers = Headers and query = Cabeçalhos e query
tries = Attempts = Tentativas
devolver = given back = devolvida
prazo = lease ended = prazo esgotado
reenviar = replayed = reenviada
copy = Copy = Copiar
copy curl = Copy as curl = Copiar como curl
download = Download = Baixar
copied = Copied. = Copiado.
not copied = The browser does not let it be copied. = O navegador não deixa copiar.
cut = … the rest is not shown: download it = … o resto não é mostrado: baixe
long text = {n} characters, {kind}, not shown = {n} caracteres, {kind}, não mostrados
binary = {n}, no text; the first bytes: = {n}, sem texto; os primeiros bytes:
some text = text = texto
because = Reason (optional) = Motivo (opcional)
cancel = Cancel = Cancelar
fluindo = flowing = fluindo
sondando = in trouble, being tried = com problema, tentando
parado = in trouble, waiting = com problema, esperando
limitado = asked to wait (429) = pediu para esperar (429)
bloqueado = blocked by the broker = bloqueado pelo broker
pausado = paused = pausado
waiting n = {n} wait = {n} esperam
oldest n = the oldest for {age} = a mais antiga há {age}
in flight = {n} in flight = {n} em voo
five minutes = 5 min: {n} tries, {m} failed = 5 min: {n} tentativas, {m} falhas
last good = last success {age} ago = último sucesso há {age}
last error = last error {age} ago: {error} = último erro há {age}: {error}
next try = next try in {age} = próxima tentativa em {age}
at once = at once = já
outcome conexao = no connection = sem conexão
outcome timeout = no answer in time = sem resposta a tempo
outcome interrompida = broken off = interrompida
outcome nack = refused by the broker = recusada pelo broker
outcome 2xx = taken (2xx) = aceitas (2xx)
outcome ok = taken = aceitas
outcome 3xx = redirected (3xx) = redirecionadas (3xx)
outcome 4xx = refused (4xx) = recusadas (4xx)
outcome 5xx = failed there (5xx) = falharam lá (5xx)
refused token = wrong token = token errado
refused storage = storage trouble (503) = falha de disco (503)
motivo = Reason = Motivo
fonte = Source = Fonte
caminho = Path = Caminho
metodo = Method = Método
evento = Event = Evento
chave = Conversation = Conversa
tentativa = Attempts = Tentativas
tamanho = Bytes = Bytes
recebido_em = Received = Recebida
reservado_ate = Leased until = Reservada até
disponivel_em = Not before = Não antes de
resolvido_em = Settled = Resolvida
no reason given = no reason given = sem motivo
do reenviar = Replay = Reenviar
do processado = Mark as done = Marcar como processada
do erro = Mark as failed = Marcar como erro
do apagar = Erase = Apagar
do agora = Deliver now = Entregar agora
do alike = All with this reason … = Todas com este motivo …
then reenviar = Back to the queue, with attempts reset. = Volta para a fila, com as tentativas zeradas.
then processado = It is not given out again. = Não é mais entregue.
then erro = It is not given out until a person decides. = Não é entregue até alguém decidir.
then apagar = It is gone for good. = É apagada para sempre.
then agora = It does not wait for its delay any longer. = Não espera mais pelo seu prazo.
leased = A consumer has it now. = Um consumidor está com ela agora.
at least = at least {n} = ao menos {n}
was reenviar = {n} back in the queue = {n} de volta na fila
was processado = {n} marked as done = {n} marcadas como processadas
was erro = {n} marked as failed = {n} marcadas como erro
was apagar = {n} erased = {n} apagadas
was agora = {n} brought forward = {n} adiantadas
not all = {n} could not: they have changed meanwhile. = {n} não puderam: mudaram nesse meio-tempo.
stopped at = Done: {n} of {m}. Then: {error} = Feitas: {n} de {m}. Depois: {error}
not done = Not done: {error} = Não foi feito: {error}
target done = Told {name}. = {name} avisado.
401 = The token is not accepted. = O token não é aceito.
404 = The message is not there any more. = A mensagem não existe mais.
409 = the message has changed meanwhile. = a mensagem mudou nesse meio-tempo.
429 = Too many wrong tokens. Wait a minute. = Muitos tokens errados. Espere um minuto.
503 = the service is in trouble (503). = o serviço está com problemas (503).
proxy = something in front of buffer.py answers {status}. = algo na frente do buffer.py responde {status}.
foreign = what answers is not buffer.py. = quem responde não é o buffer.py.
late = no answer in time. = sem resposta a tempo.
offline = no connection. = sem conexão.
old numbers = Old numbers, trying again: {error} = Números velhos, tentando de novo: {error}
"""


def page_texts():
    """{language: {key: text}} as JSON."""
    lines = [line.split(" = ") for line in PAGE_WORDS.strip().splitlines()]
    english, portuguese = ({line[0]: line[n] for line in lines} for n in (1, 2))
    return json.dumps({"en": english, "pt": portuguese})


PAGE_STYLE = r"""
:root {
  color-scheme: light dark;
  --line: color-mix(in srgb, CanvasText 18%, Canvas);
  --edge: color-mix(in srgb, CanvasText 55%, Canvas);
  --soft: color-mix(in srgb, CanvasText 68%, Canvas);
  --tint: color-mix(in srgb, CanvasText 5%, Canvas);
  --blue: color-mix(in srgb, royalblue 70%, CanvasText);
  --green: color-mix(in srgb, seagreen 70%, CanvasText);
  --amber: color-mix(in srgb, peru 60%, CanvasText);
  --red: color-mix(in srgb, crimson 75%, CanvasText);
}
* { box-sizing: border-box; min-width: 0; margin: 0; overflow-wrap: anywhere }
[hidden] { display: none !important }
html { overflow-anchor: none }
body {
  font: 16px/1.4 system-ui, sans-serif;
  max-width: 80rem;
  margin: auto;
  padding: .75rem .75rem 5rem;
}
h1, h2, h3 { font-size: 1.0625rem; outline: none }
h1 { overflow-wrap: normal }
small, dt, label, .soft { color: var(--soft); font-size: .875rem }
section, #machine {
  padding: .75rem 1rem;
  border: 1px solid var(--line);
  border-radius: .75rem;
  background: Canvas;
}
#inside, .stack { display: grid; gap: .75rem }
.row { display: flex; flex-wrap: wrap; gap: .5rem .75rem; align-items: center }
.grow { flex: 1 1 8rem }
.grid {
  display: grid;
  grid-template-columns: repeat(auto-fill, minmax(min(11rem, 45%), 1fr));
  gap: .5rem .75rem;
}
button, input, select, textarea {
  font: inherit;
  font-size: 1rem;
  min-height: 2.5rem;
  padding: .25rem .75rem;
  border: 1px solid var(--edge);
  border-radius: .5rem;
  background: Canvas;
  color: CanvasText;
}
button, a, summary, .message, [type=checkbox] { cursor: pointer }
button:hover, [aria-pressed=true] { border-color: CanvasText; box-shadow: 0 0 0 1px CanvasText }
button[aria-busy=true] { opacity: .6; cursor: progress }
button:disabled { color: var(--soft); border-color: var(--line); cursor: default }
.small { min-height: 2rem; padding: .125rem .625rem; font-size: .9375rem }
.main { background: CanvasText; color: Canvas }
.main.apagar { background: var(--red); color: Canvas; border-color: var(--red) }
[type=checkbox] { min-height: 0; width: 1.25rem; height: 1.25rem; accent-color: var(--blue) }
.pendente, .link { color: var(--blue) }
.processando, .sondando, .bloqueado, .limitado, .pausado { color: var(--amber) }
.processado, .ok { color: var(--green) }
.erro, .parado, .bad, .apagar { color: var(--red) }
.zero { color: var(--soft) }
.link { border: 0; padding: 0; min-height: 1.5rem; background: none; text-decoration: underline }

header { padding-bottom: .5rem }
#asof { white-space: nowrap }
.stale #inside :is(b, .number, #flow, #asof) { color: var(--soft) }
.busy::before {
  content: "";
  position: fixed;
  z-index: 2;
  inset: 0 0 auto;
  height: 4px;
  background: linear-gradient(90deg, var(--line), var(--blue), var(--line)) 0 / 50% 100%;
  animation: busy 1s linear infinite;
}
@keyframes busy { to { background-position: -100% } }
@media (prefers-reduced-motion: reduce) { .busy::before { animation: none } }
#login { max-width: 24rem; margin: 20vh auto 0 }

#state { border-left: .375rem solid var(--green) }
#state.wrong { border-color: var(--red) }
#state.unknown { border-color: var(--edge) }
#problems { display: grid; gap: .5rem; padding: 0; list-style: none }
#problems:empty { display: none }
#counts { display: grid; grid-template-columns: repeat(4, 1fr); gap: .5rem }
#counts button { padding: .25rem; overflow-wrap: normal }
#counts b { display: block; font-size: 1.375rem }
#counts span { font-size: clamp(.6875rem, 2.6vw, .9375rem) }
.target { padding: .5rem 0; border-top: 1px solid var(--line) }
.target:first-child { border: 0; padding-top: 0 }

#plot { position: relative; height: 8rem; border-bottom: 1px solid var(--edge) }
#plot svg { width: 100%; height: 100%; display: block }
#plot small { position: absolute; right: 0; background: Canvas; font-size: .75rem; padding: 0 2px }
#top { top: 0 }
#middle { top: 50% }
#at {
  position: absolute;
  inset: 0;
  width: 100%;
  height: 100%;
  margin: 0;
  padding: 0;
  border: 0;
  opacity: 0;
  cursor: crosshair;
}
#plot:focus-within { outline: 2px solid var(--blue); outline-offset: 2px }

#filter label { display: grid; gap: .125rem }
#filter .row { align-items: end }
#head { position: sticky; top: 0; z-index: 1; background: Canvas; padding: .25rem 0 }
#rows, #why { padding: 0; list-style: none }
.message, .reason { border-top: 1px solid var(--line); padding: .375rem .25rem }
.message:hover, .message:focus-within { background: var(--tint) }
.message {
  display: grid;
  grid-template: "choose id id status" "choose from why why" / 2rem fit-content(45%) 1fr auto;
  column-gap: .5rem;
}
.message > * { overflow: hidden; white-space: nowrap; text-overflow: ellipsis }
.message label { grid-area: choose; align-self: stretch; display: grid; place-items: center start }
.message .id { grid-area: id; padding: .125rem 0 }
.message .status { grid-area: status }
.message .from { grid-area: from; font-size: .9375rem }
.message .why { grid-area: why; line-height: 1.6 }
.reason { display: grid; grid-template-columns: 4rem 1fr auto; gap: .75rem; align-items: center }
.reason .number { text-align: right; font-weight: bold }
.reason .text { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; text-align: left }
.number { font-variant-numeric: tabular-nums }

dialog { margin: auto; padding: 0; border: 1px solid var(--edge); border-radius: .75rem }
dialog > * { padding: 1rem }
dialog::backdrop { background: rgb(0 0 0 / .4) }
#one { width: 48rem; max-width: 100%; max-height: 92vh }
#ask { width: 28rem; max-width: calc(100% - 1.5rem) }
#verbs {
  position: sticky;
  top: 0;
  background: Canvas;
  padding: .5rem 0;
  border-bottom: 1px solid var(--line);
}
#verbs .apagar { margin-left: auto }
pre {
  white-space: pre-wrap;
  font-size: .875rem;
  border-left: 2px solid var(--line);
  padding-left: .75rem;
}
dd, #what { white-space: pre-wrap }
#tries { padding-left: 1.5rem; font-size: .9375rem }
code { font-size: .9375rem }
textarea { width: 100%; min-height: 4rem }

#bar {
  pointer-events: none;
  position: fixed;
  z-index: 3;
  inset: auto 0 0;
  margin: auto;
  width: fit-content;
  max-width: 46rem;
  padding: .5rem .75rem;
  display: grid;
  gap: .375rem;
}
#bar > div {
  pointer-events: auto;
  padding: .375rem .375rem .375rem .875rem;
  border-radius: .625rem;
  border: 1px solid var(--edge);
  border-left: .375rem solid currentColor;
  background: Canvas;
  box-shadow: 0 2px 12px rgb(0 0 0 / .3);
}
@media (min-width: 48rem) {
  .message {
    grid-template: "choose id status from why" / 2rem 10rem 11rem minmax(10rem, 2fr) 3fr;
    padding: .5rem .25rem;
  }
}
@media (max-width: 30rem) {
  body { padding: .5rem .5rem 5rem }
  section, #machine { padding: .5rem .625rem }
  #one { height: 100%; max-height: 100%; border: 0; border-radius: 0 }
  .reason { grid-template-columns: 3rem 1fr auto; gap: .5rem }
}
@media (max-width: 22rem) { #counts { grid-template-columns: 1fr 1fr } }
@media (pointer: coarse) { button, input, select { min-height: 2.75rem } }
"""

PAGE_BODY = r"""
<header class="row">
  <h1>buffer.py</h1>
  <small id="host"></small>
  <small id="asof" class="grow"></small>
  <button id="leave" class="small" data-t="leave" hidden></button>
</header>
<main>
<form id="login" class="stack" method="dialog" hidden>
  <input type="text" autocomplete="username" value="buffer.py" hidden>
  <label class="stack"><span data-t="token"></span>
    <input id="token" type="password" autocomplete="current-password" required
      aria-describedby="which refused"></label>
  <small id="which" data-t="token which"></small>
  <label class="row"><input id="remember" type="checkbox"><span data-t="remember"></span></label>
  <p id="refused" class="bad" role="alert"></p>
  <button class="main" data-t="enter"></button>
</form>
<div id="inside" hidden>
  <section id="state" class="stack unknown" aria-labelledby="verdict">
    <h2 id="verdict" tabindex="-1" data-t="no data yet"></h2>
    <ul id="problems"></ul>
  </section>
  <section id="first" class="stack" aria-labelledby="firsttitle" hidden>
    <h2 id="firsttitle" data-t="first"></h2>
    <div class="row"><code id="url" class="grow"></code>
      <button id="copyurl" class="small" data-t="copy"></button></div>
    <small data-t="first how"></small>
    <code id="tryit"></code>
  </section>
  <section class="stack" aria-labelledby="now">
    <h2 id="now" hidden data-t="queue"></h2>
    <div id="counts"></div>
    <p id="flow"></p>
    <div id="others" class="row"></div>
  </section>
  <section id="delivery" class="stack" aria-labelledby="deliverytitle" hidden>
    <h2 id="deliverytitle" data-t="delivery"></h2>
    <div id="targets"></div>
  </section>
  <section class="stack" aria-labelledby="hour">
    <div class="row"><h2 id="hour" class="grow" data-t="history"></h2>
      <div id="periods" class="row"></div></div>
    <div id="plot">
      <svg id="chart" viewBox="0 0 600 100" preserveAspectRatio="none" role="img"
          aria-labelledby="hour sums">
        <path id="grid" stroke="currentColor" opacity=".25" vector-effect="non-scaling-stroke" />
        <path id="bars" class="pendente" fill="currentColor" opacity=".5" />
        <path id="begun" class="pendente" fill="currentColor" opacity=".25" />
        <path id="bad" class="erro" fill="currentColor" />
        <path id="line" class="processado" fill="none" stroke="currentColor" stroke-width="2"
          vector-effect="non-scaling-stroke" />
      </svg>
      <small id="top"></small><small id="middle"></small>
      <input id="at" type="range" min="0" data-label="pick a time">
    </div>
    <div class="row"><small id="ends"></small><small id="sums" class="grow"></small>
      <button id="minute" class="small" data-t="list it" hidden></button></div>
  </section>
  <details id="machine"><summary data-t="machine"></summary>
    <dl id="facts" class="grid"></dl></details>
  <section id="failed" class="stack" aria-labelledby="whytitle" hidden>
    <h2 id="whytitle" data-t="reasons"></h2>
    <ul id="why"></ul>
    <button id="morewhy" class="link"></button>
  </section>
  <section class="stack" aria-labelledby="list">
    <form id="filter" method="dialog" role="search">
      <div class="row">
        <label class="grow"><span data-t="find"></span><input id="find" type="search"></label>
        <button data-t="search"></button>
        <label><span data-t="source"></span><select id="source"></select></label>
        <label><span data-t="period"></span><select id="period"></select></label>
      </div>
    </form>
    <div id="begin"></div>
    <div id="head" class="stack">
      <div class="row">
        <h2 id="list" tabindex="-1" data-t="messages"></h2>
        <button id="news" class="small main" hidden></button>
        <div id="chips" class="row"></div>
      </div>
      <div id="sets" class="row" hidden></div>
    </div>
    <label class="row" id="allbox"><input id="all" type="checkbox"><span
      data-t="choose all"></span></label>
    <ul id="rows" aria-labelledby="list"></ul>
    <p id="none" data-t="none" hidden></p>
    <p id="progress" role="status"></p>
    <div id="pager" class="row"><button id="newer" data-t="newer"></button>
      <button id="older" data-t="older"></button></div>
  </section>
</div>
</main>
<dialog id="one" aria-labelledby="title"><div class="stack">
  <div class="row"><h2 id="title" class="grow" tabindex="-1"></h2>
    <button id="close" class="small" data-t="close"></button></div>
  <p id="reason" class="erro"></p>
  <div id="verbs" class="row"></div>
  <dl id="about" class="grid"></dl>
  <div id="tried" hidden><h3 data-t="tries"></h3><ol id="tries"></ol></div>
  <div class="row"><h3 id="body" class="grow" data-t="payload"></h3>
    <button id="copy" class="small" data-t="copy"></button>
    <button id="curl" class="small" data-t="copy curl"></button>
    <button id="download" class="small" data-t="download"></button></div>
  <pre id="payload"></pre>
  <details><summary data-t="headers"></summary><dl id="headers" class="grid"></dl></details>
</div></dialog>
<dialog id="ask" role="alertdialog" aria-labelledby="question" aria-describedby="what">
  <form class="stack" method="dialog">
    <h2 id="question"></h2>
    <p id="what"></p>
    <label id="because" class="stack"><span data-t="because"></span><textarea
      id="why_not"></textarea></label>
    <div class="row"><button id="no" data-t="cancel"></button>
      <button id="yes" value="yes" class="main"></button></div>
  </form>
</dialog>
<div id="bar">
  <div id="link" class="row bad" role="alert" hidden><span class="grow"></span></div>
  <div id="said" class="row" role="status" hidden><span class="grow"></span></div>
</div>
"""

PAGE_SCRIPT = r"""
"use strict"
const lang = /^(pt|en)\b/i.test(navigator.language) ? navigator.language : "en"
const TEXTS = WORDS[lang.slice(0, 2).toLowerCase()]
const PAGE = 25 // messages
const REASONS = 200 // of which the service tells at most
const WHOLE = 4 * 2 ** 20 // bytes up to which a payload is shown as a whole
const LIMITS = { patience: 15000, every: 5000, stale: 15000 } // milliseconds
const VERBS = { // what can be done to a message, and to all of a status
  pendente: ["agora", "processado", "erro", "apagar"],
  processando: ["processado", "erro", "apagar"],
  processado: ["reenviar", "apagar"],
  erro: ["reenviar", "processado", "apagar"],
}
const NOTHING = { pages: [] } // pages: where they begin, but the first
const chosen = new Set() // ids of messages
let view = NOTHING // the filter
let data = null // what /painel/dados has said last
let shown = { items: [], more: null } // the page of the list
let one = null // the message in the dialog
let period = "hora"
let series = [] // what the chart shows
let seen = 0 // when `data` came
let working = 0 // requests that somebody waits for
let timer

// Small things

const $ = id => document.getElementById(id)
const sum = (list, part) => list.reduce((total, item) => total + item[part], 0)
const number = n => Math.floor(n).toLocaleString(lang)
const query = values =>
  new URLSearchParams(Object.entries(values).filter(([, value]) => value))

function t(key, values = {}) {
  const text = TEXTS[key] ?? key ?? "–"
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "–")
}

function counted(n) {
  return `${number(n)} ${t(n === 1 ? "message" : "of messages")}`
}

function scaled(n, units) {
  const [unit, size] = units[0]
  return n < 2 * size ? `${number(n)} ${unit}` : scaled(n / size, units.slice(1))
}

function lasted(seconds) {
  if (seconds === null || seconds === undefined) return "–"
  return scaled(Math.max(0, seconds), [["s", 60], ["min", 60], ["h", 24], ["d", Infinity]])
}

function bytes(n) {
  return scaled(n, [["B", 1024], ["KiB", 1024], ["MiB", 1024], ["GiB", Infinity]])
}

function clock(when, exact = true) { // without the date when it is today's
  const date = new Date(when)
  const time = date.toLocaleTimeString(lang, { timeStyle: exact ? "medium" : "short" })
  const today = date.toDateString() === new Date().toDateString()
  return today ? time : `${date.toLocaleDateString(lang, { dateStyle: "short" })} ${time}`
}

function visible(text) { // what changes the direction of a line would hide what it holds
  return text.replace(/[\u202a-\u202e\u2066-\u2069]/g, c => `\\u${c.charCodeAt().toString(16)}`)
}

function make(name, values = {}, ...inside) { // what is inside becomes text, never markup
  const node = Object.assign(document.createElement(name), values)
  node.append(...inside.filter(part => part !== null && part !== undefined))
  return node
}

function put(id, ...inside) {
  $(id).replaceChildren(...inside.filter(part => part ?? false))
}

function button(text, work, className = "small", value = "") {
  const node = make("button", { className, value, type: "button" }, text)
  node.onclick = event => {
    event.stopPropagation()
    return doing(work, node)
  }
  return node
}

function facts(id, pairs) {
  put(id, ...pairs.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, visible(`${value}`)))))
}

// One place that asks the server

async function ask(path, options = {}, read = "json") {
  const headers = { "X-Token": token() }
  const signal = AbortSignal.timeout(LIMITS.patience)
  let answer
  try {
    answer = await fetch(path, { headers, signal, cache: "no-store", ...options })
    if (answer.ok && answer.status !== 204) return await answer[read]()
  } catch (error) {
    const why = { TimeoutError: "late", AbortError: "late", SyntaxError: "foreign" }
    throw Error(t(why[error.name] ?? "offline"))
  }
  if (!answer.ok) throw await refusal(answer)
}

async function refusal(answer) {
  const { status } = answer
  const own = /^text\/plain/.test(answer.headers.get("Content-Type"))
  const text = own ? await answer.text() : ""
  if (own && (status === 401 || status === 429)) leave(t(`${status}`)) // wrong tokens only
  const known = status === 404 ? text.startsWith("mensagem") : TEXTS[status]
  return Error(!own ? t("proxy", { status }) : known ? t(`${status}`) : text.trim())
}

const post = path => ask(path, { method: "POST" })

function token() {
  return localStorage.token || sessionStorage.token || ""
}

function enter() { // a header holds bytes
  const bytes_ = new TextEncoder().encode($("token").value.trim())
  const where = $("remember").checked ? localStorage : sessionStorage
  where.token = String.fromCharCode(...bytes_)
  sessionStorage.refused = ""
  location.reload()
}

function leave(refused = "") { // and keep nothing of what was shown
  localStorage.removeItem("token")
  Object.assign(sessionStorage, { token: "", refused })
  location.reload()
}

async function doing(work, node = null) { // what a person waits for
  if (node?.ariaBusy === "true") return
  if (node) node.ariaBusy = "true"
  busy(1)
  try {
    await work()
  } catch (error) {
    say("said", t("not done", { error: error.message }), "bad")
  } finally {
    busy(-1)
    if (node) node.ariaBusy = "false"
  }
}

function busy(step) {
  working += step
  document.body.classList.toggle("busy", working > 0)
}

// One place that says things, until they are dismissed or replaced

function say(id, text, kind = "ok") {
  const dialog = [...document.querySelectorAll("dialog[open]")].pop()
  const place = dialog ?? document.body // what is outside of a dialog cannot be clicked
  if ($("bar").parentNode !== place) place.append($("bar"))
  const line = $(id)
  line.hidden = !text
  line.className = `row ${kind}`
  if (line.firstElementChild.textContent !== text) line.firstElementChild.textContent = text
}

function closed() { // a dialog has been, and the bar must not go with it
  if (!$("bar").parentNode.open) document.body.append($("bar"))
}

// What is wrong, and how the queue stands

function show(answer) {
  data = answer
  seen = Date.now()
  $("asof").textContent = t("as of", { time: clock(seen) })
  $("host").textContent = data.maquina ?? location.host
  drawProblems(data.problemas ?? [])
  drawSources()
  drawCounts()
  drawFlow()
  drawTargets(data.entrega ?? [])
  drawChart()
  drawMachine()
  const none = !Object.values(data.contadores?.recebidas ?? {}).some(Boolean)
  $("first").hidden = !none || sum(data.mensagens, "quantidade") > 0
}

function drawProblems(problems) {
  const n = problems.length
  const bad = n > 0
  $("state").className = `stack ${bad ? "wrong" : ""}`
  $("verdict").className = bad ? "erro" : "processado"
  $("verdict").textContent = !bad ? t("all well") : t(n === 1 ? "problem" : "problems", { n })
  put("problems", ...problems.map(problem))
  document.title = `${bad ? `(${n}) ` : ""}${$("host").textContent} · buffer.py`
  icon(n)
}

function problem({ tipo, texto, desde, destino, numeros = {} }) {
  const target = (data.entrega ?? []).find(item => item.destino === destino)
  const size = tipo === "disk" ? bytes : number
  const values = {
    ...Object.fromEntries(Object.entries(numeros).map(([key, n]) => [key, size(n)])),
    seconds: lasted(numeros.seconds),
    reasons: Object.entries(numeros.reasons ?? {}).map(refused).join(", "),
    target: target?.endereco ?? destino,
    error: (target?.ultimo_erro ?? t(target?.estado)).replace(/[.\s]+$/, ""),
    waiting: number(target?.esperando ?? 0),
    next: soon(target?.proxima),
  }
  const key = `problem ${tipo}`
  const since = { time: clock(Date.now() - 1000 * desde, false), age: lasted(desde) }
  return make("li", {}, make("span", {}, visible(TEXTS[key] ? t(key, values) : texto)), " ",
    make("small", {}, t("since", since)), " ", remedy(tipo, destino))
}

function soon(seconds) {
  return seconds === 0 ? t("at once") : lasted(seconds)
}

function refused([reason, n]) {
  return `${number(n)} × ${TEXTS[`refused ${reason}`] ?? reason}`
}

function remedy(tipo, destino) { // the button of a problem
  if (tipo === "destino") return button(t("try now"), () => tell("tentar", destino))
  if (tipo === "erro") return button(t("show"), () => go({ ...NOTHING, status: "erro" }, true))
  const waits = ["age", "consumo", "queue"].includes(tipo)
  if (waits) return button(t("show"), () => go({ ...NOTHING, status: "pendente" }, true))
  return null
}

function icon(problems) { // seen without looking
  const canvas = make("canvas", { width: 32, height: 32 })
  const pen = canvas.getContext("2d")
  pen.fillStyle = problems ? "#c8102e" : "#2e8b57"
  pen.arc(16, 16, 15, 0, 7)
  pen.fill()
  pen.fillStyle = "white"
  pen.font = "bold 22px sans-serif"
  pen.textAlign = "center"
  pen.fillText(problems || "✓", 16, 24)
  $("icon").href = canvas.toDataURL()
}

function drawSources() {
  const names = [...new Set(data.mensagens.map(({ fonte }) => fonte).filter(Boolean))].sort()
  const failed = name => sum(data.mensagens.filter(({ fonte, status }) =>
    fonte === name && status === "erro"), "quantidade")
  const labels = ["", ...names].map(name => {
    const n = name ? failed(name) : 0
    return [name, (name || t("all")) + (n ? ` (${number(n)} ${t("erro")})` : "")]
  })
  const before = [...$("source").options].map(({ label }) => label).join()
  if (before === labels.map(([, label]) => label).join()) return
  options("source", labels, view.fonte ?? "")
}

function options(id, pairs, selected) {
  put(id, ...pairs.map(([value, label]) =>
    make("option", { value, label, selected: value === selected }, label)))
}

function total(status) { // of the source that is chosen
  return sum(data.mensagens.filter(item => (!status || item.status === status) &&
    (!view.fonte || item.fonte === view.fonte)), "quantidade")
}

function drawCounts() {
  for (const node of $("counts").children) {
    const n = total(node.value)
    node.firstChild.textContent = number(n)
    node.className = n ? node.value : "zero"
    node.ariaPressed = `${view.status === node.value && !view.adiadas}`
  }
  const delayed = data.adiadas ?? 0
  const which = { ...NOTHING, status: "pendente", adiadas: 1 }
  put("others",
    button(`${t("all")}: ${number(total(""))}`, () => go({ status: "", adiadas: "" }), "link"),
    delayed && button(`${t("delayed")}: ${number(delayed)}`, () => go(which), "link"))
}

function drawFlow() { // by the last five whole minutes
  const last = data.por_minuto.slice(-6, -1)
  const came = sum(last, 1) / 5
  const went = (sum(last, 2) + sum(last, 3)) / 5
  const all = sum(data.mensagens.filter(({ status }) => /^p.*n/.test(status)), "quantidade")
  const rate = n => n.toLocaleString(lang, { maximumFractionDigits: n < 10 ? 1 : 0 })
  const parts = [t("rates", { in: rate(came), out: rate(went) })]
  if (all && went > came) parts.push(t("empty in", { time: lasted(60 * all / (went - came)) }))
  if (went < came) parts.push(t("grows", { n: rate(came - went) }))
  if (all && went && went === came) parts.push(t("steady"))
  const age = data.nao_resolvida ?? data.mais_antiga
  if (all && age !== null) parts.push(t("oldest", { age: lasted(age) }))
  $("flow").textContent = parts.join(" · ")
}

function drawTargets(targets) {
  $("delivery").hidden = !targets.length
  const before = document.activeElement?.value
  put("targets", ...targets.map(target))
  if (before?.includes(" ")) { // a button that has been drawn anew keeps the focus
    [...$("targets").querySelectorAll("button")].find(({ value }) => value === before)?.focus()
  }
}

function target(item) {
  const { destino, endereco, estado, desde } = item
  const { esperando, mais_antiga, em_voo, tentativas_5min, falhas_5min } = item
  const error = { age: lasted(item.ultimo_erro_ha), error: item.ultimo_erro }
  const lines = [
    esperando && t("waiting n", { n: number(esperando) }),
    esperando && t("oldest n", { age: lasted(mais_antiga) }),
    em_voo && t("in flight", { n: number(em_voo) }),
    tentativas_5min && t("five minutes", { n: number(tentativas_5min), m: number(falhas_5min) }),
    item.ultimo_sucesso != null && t("last good", { age: lasted(item.ultimo_sucesso) }),
    item.proxima && t("next try", { age: lasted(item.proxima) }),
    ...Object.entries(item.tentativas ?? {}).map(([key, n]) => `${outcome(key)}: ${number(n)}`),
  ]
  const since = desde == null ? "" : `, ${lasted(desde)}`
  return make("div", { className: "target" },
    make("div", { className: "row" },
      make("b", { className: "grow" }, endereco ? `${destino} · ${endereco}` : destino),
      make("b", { className: estado }, t(estado) + since), ...controls(item)),
    make("small", {}, lines.filter(Boolean).join(" · ")),
    item.ultimo_erro && make("p", { className: "soft" }, visible(t("last error", error))))
}

function outcome(key) {
  return TEXTS[`outcome ${key}`] ?? key
}

function controls({ destino, estado, problema }) {
  const verb = estado === "pausado" ? ["retomar", "resume"] : ["pausar", "pause"]
  const control = ([path, text]) =>
    button(t(text), () => tell(path, destino), "small", `${path} ${destino}`)
  return [verb, ...(problema ? [["tentar", "try now"]] : [])].map(control)
}

async function tell(verb, destino) {
  await post(`entrega/${verb}?${query({ destino })}`)
  say("said", t("target done", { name: destino }))
  await refresh()
}

function drawMachine() {
  const { conversas: talks, livre, arquivo, wal, versao } = data
  facts("facts", [
    [t("disk"), bytes(livre)],
    [t("database"), `${bytes(arquivo)} + ${bytes(wal)}`],
    [t("version"), versao],
    ...talks ? [[t("conversations"), t("talks", { n: number(talks.esperando),
      age: lasted(talks.mais_antiga), m: number(talks.em_trabalho) })]] : [],
  ])
}

// The chart

function drawChart() {
  series = period === "hora" ? data.por_minuto : data.por_periodo ?? series
  const high = Math.max(2, ...series.flatMap(([, came, done, failed]) => [came, done, failed]))
  const wide = 600 / series.length
  const y = n => 100 - 92 * (n ?? 0) / high
  const bar = n => (row, x) => row[n] ? `M${x * wide + .1 * wide} 100V${y(row[n])}h${
    .8 * wide}V100` : ""
  $("grid").setAttribute("d", `M0 ${y(high)}H600M0 ${y(high / 2)}H600`)
  const came = series.map(bar(1))
  $("begun").setAttribute("d", came.pop()) // is not over, and pale
  $("bars").setAttribute("d", came.join(""))
  $("bad").setAttribute("d", series.map(bar(3)).join(""))
  const whole = series.slice(0, -1) // the last one has only begun
  $("line").setAttribute("d", `M${whole.map((row, x) => `${(x + .5) * wide} ${y(row[2])}`)
    .join("L")}`)
  $("top").textContent = number(high)
  $("middle").textContent = number(high / 2)
  $("at").max = series.length - 1
  $("ends").textContent = `${clock(1000 * series[0][0], false)} –`
  const sums = [1, 2, 3].map(part => sum(series, part))
  if ($("minute").hidden) valuesOf("", sums)
  for (const node of $("periods").children) node.ariaPressed = `${node.value === period}`
}

function valuesOf(time, values) { // each in the colour that it has in the chart
  const names = ["received", "done", "failed"]
  const colours = ["pendente", "processado", "erro"]
  put("sums", time && `${time} · `, ...values.map((n, at) => make("span", {
    className: colours[at] }, `${at === 1 ? "—" : "■"} ${number(n)} ${t(names[at])} `)))
}

function choosePeriod(name) {
  period = name
  $("minute").hidden = true
  return refresh()
}

function touch(index) {
  const row = series[Math.max(0, Math.min(series.length - 1, index))]
  if (!row) return
  $("at").value = series.indexOf(row)
  $("minute").hidden = false
  valuesOf(clock(1000 * row[0], false), row.slice(1))
  $("at").setAttribute("aria-valuetext", $("sums").textContent)
}

function listMinute() {
  const begins = series[$("at").value][0]
  const end = begins + series[1][0] - series[0][0] - 1
  return go({ desde: iso(begins), ate: iso(end), pages: [] }, true)
}

function iso(seconds) {
  return new Date(1000 * seconds).toISOString().slice(0, 19) + "Z"
}

// The list

function filter({ status, fonte, motivo, parecido, adiadas, desde, ate } = view) {
  return { status, fonte, motivo, parecido, adiadas, desde, ate }
}

function criteria(where) { // motivo="" means those without one
  const text = query(where)
  return where.motivo === "" ? `${text}&motivo=` : `${text}`
}

async function load() { // the list and the reasons, of one and the same filter
  const mine = view
  const fresh = () => mine === view
  const [page, reasons] = await Promise.all([
    mine.busca ? search(mine, fresh) : fetchPage(mine), fetchReasons(mine)])
  if (!fresh()) return
  draw(page)
  drawReasons(reasons)
}

async function fetchPage(mine) {
  const more = { ordem: "desc", depois: mine.pages.at(-1), limite: PAGE + 1 }
  const found = await ask(`fila?${criteria(filter(mine))}&${query(more)}`)
  const items = found.slice(0, PAGE)
  return { items, more: found.length > PAGE ? items.at(-1).id : null }
}

async function search(mine, fresh) { // slice by slice; senders have half of the time
  const items = []
  let next = mine.pages.at(-1)
  do {
    const began = Date.now()
    const values = { busca: mine.busca, limite: PAGE - items.length }
    const where = { ...filter(mine), ...next ? { ate: next } : {} }
    const found = await ask(`fila?${criteria(where)}&${query(values)}`)
    if (!fresh()) return null
    items.push(...found.mensagens.filter(({ id }) => !items.some(item => item.id === id)))
    next = found.ate
    draw({ items, more: null })
    $("none").hidden = true
    $("progress").textContent = next ? t("searching", { time: `#${next}` }) : ""
    await new Promise(done => setTimeout(done, Math.min(500, Date.now() - began)))
  } while (next && items.length < PAGE)
  if (fresh()) $("progress").textContent = ""
  return { items, more: next }
}

function draw(page) {
  shown = page
  $("news").hidden = true
  put("rows", ...page.items.map(message))
  $("none").hidden = page.items.length > 0
  $("newer").disabled = !view.pages.length
  $("older").disabled = !page.more
  $("pager").hidden = !view.pages.length && !page.more
  $("allbox").hidden = !page.items.length
  $("all").checked = false
  drawSets()
}

function message(item) {
  const { id, status, fonte, caminho, motivo, disponivel_em: later } = item
  const box = make("input", { type: "checkbox", checked: chosen.has(id), value: id })
  box.ariaLabel = t("choose", { id })
  box.onchange = () => choose([id], box.checked)
  const waits = status === "pendente" && later && new Date(later) > Date.now()
  const state = t(status) + (waits ? ` ${t("until", { time: clock(later, false) })}` : "")
  const row = make("li", { className: "message" },
    make("label", { onclick: event => event.stopPropagation() }, box),
    make("span", { className: "id" }, make("a", { href: `#${id}` }, `${id}`), " ",
      make("small", {}, clock(item.recebido_em))),
    make("b", { className: `status ${status}` }, state),
    make("span", { className: "from" }, [fonte, caminho].filter(Boolean).join(" / ") || "–"),
    make("small", { className: `why ${motivo ? "erro" : ""}` }, motivo ?? about(item)))
  row.onclick = event => {
    const choosing = !getSelection().isCollapsed || event.target.closest("a, label")
    if (!choosing) location.hash = id
  }
  return row
}

function about({ chave, evento, payload, codificacao }) { // whom or what it is about
  const leaves = value => value === null || typeof value !== "object" ? [`${value}`]
    : Object.values(value).flatMap(leaves)
  const parts = [chave, evento, ...codificacao ? [] : leaves(payload)]
  return visible(parts.filter(Boolean).join(" · ").slice(0, 300))
}

async function go(change, scroll = false) {
  view = { ...view, pages: [], ...change }
  if (change.status !== undefined) for (const key of ["motivo", "parecido"]) {
    if (change[key] === undefined) delete view[key]
  }
  if (change.status !== undefined && !change.adiadas) delete view.adiadas
  chosen.clear()
  keep()
  if (data) drawCounts()
  await load()
  const top = scroll && change.status && !$("failed").hidden ? "failed" : "begin"
  if (scroll || change.pages) $(top).scrollIntoView()
  $("list").focus({ preventScroll: true })
}

function keep() { // the filter in the address, and the address in the filter
  const { pages, ...values } = view
  history.replaceState(null, "", `#${criteria(values)}`)
  $("find").value = view.busca ?? ""
  $("source").value = view.fonte ?? ""
  drawChips()
}

function drawChips() {
  const { parecido, motivo, desde, ate, adiadas, busca, status } = view
  const time = [desde, ate].map(text => text ? clock(text, false) : "").join(" – ")
  const chip = (text, ...names) => {
    const off = Object.fromEntries(names.map(name => [name, undefined]))
    const node = button(`${text.slice(0, 60)} ✕`, () => go({ ...view, ...off, pages: [] }))
    node.ariaLabel = t("without filter", { what: text })
    return node
  }
  put("chips", status && chip(t(adiadas ? "delayed" : status), "status", "adiadas", "parecido",
    "motivo"), (parecido ?? motivo ?? "") !== "" && chip(parecido ?? motivo, "parecido", "motivo"),
  motivo === "" && chip(t("no reason given"), "motivo"),
  (desde || ate) && chip(time, "desde", "ate"), busca && chip(busca, "busca"))
}

// What is done to many

function choose(ids, on) {
  for (const id of ids) on ? chosen.add(id) : chosen.delete(id)
  drawSets()
}

function drawSets() {
  const all = view.status && !view.busca && shown.items.length > 0
  const states = shown.items.filter(({ id }) => chosen.has(id)).map(({ status }) => status)
  const verbs = chosen.size ? [...new Set(states.flatMap(status => VERBS[status]))]
    : (VERBS[view.status] ?? []).filter(verb =>
      (verb !== "agora" || view.adiadas) && view.status !== "processando")
  $("sets").hidden = !verbs.length || !(all || chosen.size)
  const label = chosen.size ? t("chosen", { n: number(chosen.size) }) : t("these")
  const work = verb => chosen.size ? actChosen(verb, [...chosen]) : actAll(verb, filter())
  put("sets", make("small", {}, label), ...verbs.map(verb =>
    button(t(`do ${verb}`), () => work(verb), `small ${verb === "apagar" ? verb : ""}`, verb)))
}

function request(verb, id = "") { // [path, method]
  const at = id ? `/${id}` : ""
  if (verb === "apagar") return [`fila${at}`, "DELETE"]
  return [`fila${at}/${verb === "agora" ? "devolver" : verb}`, "POST"]
}

async function actChosen(verb, ids) {
  const reason = await confirm_(verb, ids.length, ids.slice(0, 20).join(", "))
  if (reason === null) return
  let done = 0
  if (verb === "apagar") {
    for (const id of ids) done += await ask(...erase(id)).then(() => 1, () => 0)
  } else {
    const [path] = request(verb)
    const body = JSON.stringify({ ids, ...reason && { motivo: reason } })
    const now = verb === "agora" ? "?em=0" : ""
    const answer = await ask(path + now, { method: "POST", body })
    done = answer.ids.length
  }
  chosen.clear()
  const missed = ids.length - done
  const rest = missed ? ` ${t("not all", { n: number(missed) })}` : ""
  await acted(t(`was ${verb}`, { n: counted(done) }) + rest, missed ? "bad" : "ok")
}

function erase(id) {
  return [`fila/${id}`, { method: "DELETE" }, "text"]
}

async function actAll(verb, where) { // what a filter lets through by now, 5,000 at once
  if (verb === "agora") where = { ...where, adiadas: 1 }
  const { quantidade, ate, mais } = await ask(`fila/quantas?${criteria(where)}`)
  if (!quantidade) return say("said", t("none"))
  const what = [where.fonte, where.parecido ?? where.motivo ?? t(where.status)]
  const n = mais ? t("at least", { n: number(quantidade) }) : quantidade
  if (await confirm_(verb, n, what.filter(Boolean).join(": "), false) === null) return
  const [path, method] = request(verb)
  const now = verb === "agora" ? "&em=0" : ""
  let done = 0
  let answer
  try {
    do {
      answer = await ask(`${path}?${criteria({ ...where, ate })}${now}`, { method })
      done += answer.quantidade
    } while (answer.mais && answer.quantidade)
  } catch (error) {
    throw Error(t("stopped at", { n: number(done), m: number(quantidade), error: error.message }))
  }
  shut()
  await acted(t(`was ${verb}`, { n: counted(done) }))
}

async function act(verb, item) { // to one message
  const what = [item.id, item.fonte, about(item).slice(0, 80)].filter(Boolean).join(" · ")
  const more = item.status === "processando" ? `\n${t("leased")}` : ""
  const reason = await confirm_(verb, 1, what + more)
  if (reason === null) return
  const [path, method] = request(verb, item.id)
  const fence = verb === "apagar" ? "" : `?${query({ tentativa: `${item.tentativa}`,
    em: verb === "agora" && "0" })}`
  try {
    await ask(path + fence, { method, body: reason || null }, "text")
  } catch (error) {
    await look(item.id).catch(() => {})
    throw error
  }
  shut()
  await acted(t(`was ${verb}`, { n: `${counted(1)} (${item.id})` }))
}

async function acted(text, kind) {
  say("said", text, kind)
  await Promise.all([load(), refresh()])
}

async function confirm_(verb, n, what, reasons = true) { // the reason, or null
  const many = typeof n === "number" ? counted(n) : `${n} ${t("of messages")}`
  $("question").textContent = `${t(`do ${verb}`)}: ${many}`
  $("what").textContent = visible(`${what}\n${t(`then ${verb}`)}`)
  $("yes").textContent = t(`do ${verb}`)
  $("yes").className = `main ${verb}`
  $("because").hidden = verb !== "erro" || !reasons
  $("ask").returnValue = $("why_not").value = ""
  $("ask").showModal()
  $("no").focus()
  busy(-1) // it waits for the person
  await new Promise(done => { $("ask").onclose = done })
  busy(1)
  closed()
  return $("ask").returnValue ? $("why_not").value : null
}

// Why messages have failed

async function fetchReasons({ status, fonte, desde, ate, parecido, motivo, busca }) {
  if (status !== "erro" || busca || parecido !== undefined || motivo !== undefined) return []
  return ask(`fila/motivos?${query({ fonte, desde, ate, agrupar: 1 })}`)
}

function drawReasons(reasons, few = 5) {
  $("failed").hidden = !reasons.length
  put("why", ...reasons.slice(0, few).map(reason))
  const rest = reasons.length - few
  $("morewhy").hidden = rest <= 0
  const most = reasons.length === REASONS ? "+" : ""
  $("morewhy").textContent = t("more reasons", { n: number(rest) + most })
  $("morewhy").onclick = () => drawReasons(reasons, reasons.length)
}

function reason({ motivo, quantidade, motivos }) {
  const same = motivo === null ? { motivo: "" } : { parecido: motivo }
  const where = { ...filter(), ...same }
  const more = motivos > 1 ? ` (+${number(motivos - 1)})` : "" // but for numbers in it
  const list = () => go({ ...where, pages: [] }, true)
  return make("li", { className: "reason" },
    make("span", { className: "number" }, number(quantidade)),
    button(visible(motivo ?? t("no reason given")) + more, list, "link text"),
    button(t("do reenviar"), () => actAll("reenviar", where), "small", "reenviar"))
}

// One message

async function look(id) {
  const item = await ask(`fila/${id}?completo=0`)
  const again = one?.id === item.id
  one = item
  drawOne(item)
  if (!$("one").open) {
    $("one").showModal()
    $("title").focus()
  }
  if (!again) await drawPayload(item)
}

function shut() { // at once: the event comes later, when another may be open
  $("one").close()
  one = null
  closed()
  keep()
}

function drawOne(item) {
  const { id, status, motivo, historico, headers: sent, query: asked, ...others } = item
  const hidden = ["payload", "cortado", "codificacao"]
  $("title").textContent = t("message n", { id, status: t(status) })
  $("title").className = `grow ${status}`
  $("reason").textContent = visible(motivo ?? "")
  $("reason").hidden = !motivo
  const verbs = VERBS[status].filter(verb => verb !== "agora" || item.disponivel_em)
  const nodes = verbs.map((verb, n) => button(t(`do ${verb}`), () => act(verb, item),
    n ? verb : "main", verb))
  const all = { status, parecido: motivo, fonte: view.fonte }
  const alike = button(t("do alike"), () => actAll("reenviar", all), "", "all")
  put("verbs", ...nodes.slice(0, -1), status === "erro" && motivo && alike, nodes.at(-1))
  facts("about", Object.entries(others).filter(([name]) => !hidden.includes(name))
    .map(([name, value]) => [t(name), /_(em|ate)$/.test(name) ? clock(value) : value]))
  facts("headers", [sent, asked].flatMap(values => Object.entries(values ?? {})))
  drawTries(historico ?? [])
}

function drawTries(tries) {
  $("tried").hidden = !tries.length
  put("tries", ...tries.map(({ em, por, fim, durou, motivo }) => {
    const parts = [clock(em), por, t(fim ?? "processando"), durou == null ? "" : lasted(durou)]
    return make("li", {}, visible([...parts, motivo].filter(Boolean).join(" · ")))
  }))
}

async function drawPayload({ id, tamanho, payload, codificacao }) {
  $("payload").textContent = ""
  const whole = tamanho <= WHOLE
  const body = whole ? new Uint8Array(await ask(`fila/${id}/payload`, {}, "arrayBuffer")) : null
  if (one?.id !== id) return
  const text = whole ? textOf(body) : codificacao ? null : payload
  const start = body?.slice(0, 512) ?? Uint8Array.from(atob(codificacao ? payload : ""),
    c => c.charCodeAt())
  const what = text === null ? `${t("binary", { n: bytes(tamanho) })}\n${hex(start)}`
    : visible(whole ? pretty(text) : text)
  $("payload").textContent = what + (whole ? "" : `\n${t("cut")}`)
}

function textOf(body) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(body)
  } catch {
    return null
  }
}

function hex(body) {
  return [...body].map(byte => byte.toString(16).padStart(2, "0")).join(" ")
}

function pretty(text) {
  try {
    JSON.parse(text)
  } catch {
    return text
  }
  return indented(text)
}

function indented(text) { // by tokens: JSON.parse() would change 1.10, and what is there twice
  const token_ = /("[^"\\]*(?:\\.[^"\\]*)*"|[[{]\s*[\]}])|([[{])|([\]}])|(,)|(:)|\s+/g
  let depth = 0
  const line = step => "\n" + "  ".repeat(Math.min(depth += step, 20))
  return text.replace(token_, (_, whole, open, close, comma, colon) => {
    if (whole) return whole.length > 2000 ? shortened(whole) : whole
    if (open) return open + line(1)
    if (close) return line(-1) + close
    if (comma) return comma + line(0)
    return colon ? ": " : ""
  })
}

function shortened(text) { // what it is, instead of kilobytes of base64
  const kinds = { "/9j/": "JPEG", iVBOR: "PNG", R0lGOD: "GIF", UklGR: "WebP/WAV", JVBER: "PDF",
    T2dnUw: "Ogg", SUQz: "MP3", AAAA: "MP4", UEsDB: "ZIP" }
  const start = text.slice(1, 80).replace(/^data:[^,]*,/, "")
  const kind = Object.entries(kinds).find(([magic]) => start.startsWith(magic))?.[1]
  const what = { n: number(text.length - 2), kind: kind ?? t("some text") }
  return `${text.slice(0, 60)}… (${t("long text", what)})"`
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text) // there only by https or on localhost
    say("said", t("copied"))
  } catch {
    const area = make("textarea", { value: text })
    const place = $("one").open ? $("one") : document.body
    place.append(area)
    area.select()
    const done = document.execCommand("copy")
    area.remove()
    say("said", t(done ? "copied" : "not copied"), done ? "ok" : "bad")
  }
}

async function wholeText() {
  const body = await ask(`fila/${one.id}/payload`, {}, "arrayBuffer")
  return textOf(new Uint8Array(body))
}

async function copyPayload() {
  const text = await wholeText()
  if (text === null) throw Error(t("binary", { n: bytes(one.tamanho) }))
  await copy(text)
}

async function copyCommand() {
  const quote = text => `'${text.replaceAll("'", `'\\''`)}'`
  const small = one.tamanho < 100_000
  const text = small ? await wholeText() : null
  const path = [one.fonte, one.caminho].filter(Boolean).join("/")
  const url = new URL(`webhook/${path}`.replace(/\/$/, ""), location.href)
  const kept = Object.entries(one.headers ?? {}).filter(([name]) =>
    !/^(host|content-length|accept-encoding)$/.test(name))
  const lines = [`curl ${quote(url.href)}`, `-H "X-Token: $TOKEN"`,
    ...kept.map(([name, value]) => `-H ${quote(`${name}: ${value}`)}`),
    `--data-binary ${text === null ? `@mensagem-${one.id}` : quote(text)}`]
  await copy(lines.join(" \\\n  "))
}

async function download() {
  const body = await ask(`fila/${one.id}/payload`, {}, "blob")
  const href = URL.createObjectURL(body)
  make("a", { href, download: `mensagem-${one.id}` }).click()
  setTimeout(() => URL.revokeObjectURL(href), 1000)
}

function opened() { // by an address such as /painel#2125
  const found = /^#(\d{1,18})$/.exec(location.hash)
  if (found) return doing(() => look(found[1]))
  const { pages, ...same } = view
  const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)))
  if (criteria(asked) !== criteria(same)) return doing(() => {
    view = { pages: [] }
    return go(asked)
  })
}

// Again and again

async function refresh() { // takes at most a twentieth of the time, none while nobody looks
  clearTimeout(timer)
  const began = Date.now()
  let wait = LIMITS.every
  try {
    if (token() && !document.hidden) await update()
    say("link", "")
    wait = Math.min(60000, Math.max(wait, 20 * (Date.now() - began)))
  } catch (error) {
    say("link", t("old numbers", { error: error.message }), "bad")
  }
  clearTimeout(timer)
  timer = setTimeout(refresh, wait)
}

async function update() {
  const wanted = period === "hora" ? "" : `?periodo=${period}`
  const answer = await ask(`painel/dados${wanted}`)
  steady(() => show(answer))
  if ($("one").open && one && !$("ask").open) {
    const item = await ask(`fila/${one.id}?completo=0`).catch(() => null) // it may be erased
    const changed = JSON.stringify(item) !== JSON.stringify(one)
    if (item && one?.id === item.id && changed) drawOne(one = item)
  }
  if (!view.busca && !working) await news()
}

function steady(change) { // what is above the list must not move it
  const anchor = $("rows")
  const before = scrollY > 50 ? anchor.getBoundingClientRect().top : null
  change()
  if (before !== null) scrollBy(0, anchor.getBoundingClientRect().top - before)
}

function still() { // somebody is at work in the list, or about to tap a row
  return scrollY > 50 || chosen.size || $("one").open || !getSelection().isCollapsed ||
    $("rows").matches(":hover, :focus-within")
}

async function news() {
  const mine = view
  const page = await fetchPage(mine)
  if (mine !== view || JSON.stringify(page) === JSON.stringify(shown)) return
  if (!still()) {
    const reasons = await fetchReasons(mine)
    if (mine !== view || still()) return
    draw(page)
    drawReasons(reasons)
    return
  }
  const newest = shown.items[0]?.id ?? 0
  const n = page.items.filter(({ id }) => id > newest).length
  steady(() => {
    $("news").hidden = false
    $("news").textContent = n ? t("new ones", { n: n < PAGE ? n : `${n}+` }) : t("changed")
  })
}

function aging() {
  document.body.classList.toggle("stale", seen > 0 && Date.now() - seen > LIMITS.stale)
}

// The start

function prepare() {
  document.documentElement.lang = lang
  for (const node of document.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t)
  $("at").ariaLabel = t("pick a time")
  put("counts", ...Object.keys(VERBS).map(status => {
    const node = button("", () => go({ status, busca: undefined }), "zero", status)
    node.append(make("b", {}, "–"), make("span", {}, t(status)))
    node.firstChild.remove()
    return node
  }))
  put("periods", ...["hora", "dia", "semana"].map(name =>
    button(t(name), () => choosePeriod(name), "small", name)))
  const ages = [900, 3600, 86400, 604800].map(n => [`${n}`, t(`last ${n}`)])
  options("period", [["", t("any time")], ...ages], "")
  for (const id of ["link", "said"]) {
    const close = button("✕", () => say(id, ""), "small")
    close.ariaLabel = t("dismiss")
    $(id).append(close)
  }
}

function invite() { // senders of a new installation
  const url = new URL("webhook", location.href)
  url.searchParams.set("token", t("your token"))
  $("url").textContent = url
  $("tryit").textContent = `curl -d '{"ok":1}' '${url}'`
}

function listen() {
  const on = (id, work) => { $(id).onclick = () => doing(work, $(id)) }
  on("newer", () => go({ pages: view.pages.slice(0, -1) }))
  on("older", () => go({ pages: [...view.pages, shown.more] }))
  on("news", () => go({ pages: view.pages }))
  on("leave", () => leave())
  on("close", shut)
  on("copy", copyPayload)
  on("curl", copyCommand)
  on("download", download)
  on("copyurl", () => copy($("url").textContent))
  on("minute", listMinute)
  $("all").onchange = () => {
    const boxes = [...$("rows").querySelectorAll("input")]
    for (const box of boxes) box.checked = $("all").checked
    choose(boxes.map(({ value }) => Number(value)), $("all").checked)
  }
  $("source").onchange = () => doing(() => go({ fonte: $("source").value }))
  $("period").onchange = () => doing(() => go({ ate: undefined,
    desde: $("period").value ? iso(Date.now() / 1000 - $("period").value) : undefined }))
  $("filter").onsubmit = () => doing(() => go({ busca: wanted($("find").value.trim()) }))
}

function listenToChart() {
  const at = $("at")
  at.onclick = () => doing(listMinute)
  at.oninput = () => touch(Number(at.value))
  at.onkeydown = event => { if (event.key === "Enter") doing(listMinute) }
  at.onpointermove = at.onpointerdown = ({ offsetX }) =>
    touch(Math.floor(series.length * offsetX / at.clientWidth))
}

function wanted(text) { // #2125, 2.125 and +55 (11) 98765-4321 are numbers
  const digits = text.replace(/\D/g, "")
  return /^[#+\d\s().,-]+$/.test(text) && digits ? digits : text
}

function listenToAll() {
  $("login").onsubmit = enter
  $("one").oncancel = event => {
    event.preventDefault()
    shut()
  }
  $("one").onclose = () => { if (one && !$("one").open) shut() }
  addEventListener("hashchange", opened)
  addEventListener("keydown", event => {
    const typing = event.target.closest("input, textarea, select, dialog")
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey) return
    event.preventDefault()
    $("find").focus()
  })
  document.addEventListener("visibilitychange", refresh)
  setInterval(aging, 1000)
}

async function start() {
  prepare()
  invite()
  listen()
  listenToChart()
  listenToAll()
  $("refused").textContent = sessionStorage.refused ?? ""
  $("login").hidden = !!token()
  $("inside").hidden = $("leave").hidden = !token()
  $(token() ? "verdict" : "token").focus()
  document.title = `${location.host} · buffer.py`
  icon(0)
  const hash = /^#\d*$/.test(location.hash) ? "" : location.hash.slice(1)
  view = { pages: [], ...Object.fromEntries(new URLSearchParams(hash)) }
  if (!token()) return
  drawChips()
  await Promise.all([refresh(), doing(load)])
  await opened()
}

start()
"""

PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>buffer.py</title>
<link id="icon" rel="icon" href="data:,">
<style>{PAGE_STYLE}</style>
</head>
<body>{PAGE_BODY}
<script>{PAGE_SCRIPT.replace("WORDS", page_texts(), 1)}</script>
</body>
</html>
"""


def page_hash(tag):
    text = re.search(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)[1]
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# Payloads are untrusted: nothing runs but this script, and nothing goes anywhere else.
PAGE_POLICY = (
    f"default-src 'none'; script-src {page_hash('script')}; "
    f"style-src {page_hash('style')}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
PAGE_HEADERS = (
    ("Content-Security-Policy", PAGE_POLICY),
    ("Referrer-Policy", "no-referrer"),
    *PRIVATE,
)


# What is wrong


class Condition(typing.NamedTuple):
    """One thing that can be wrong. `name` tells several of a kind apart, such as targets;
    `since` is in seconds since the epoch; ALERT_URL is told where `alarm` is true."""

    kind: str
    on: bool
    text: str  # a sentence for the operator
    numbers: dict
    alarm: bool
    name: str = ""
    since: float = None


class Watch:
    """Decides what is wrong, in one place for the page, the alarms, /metrics and `status`.

    The server's thread looks; others take `found`, which is replaced as a whole and never
    changed. It sees the file through the store and the rest through what it is given. The
    file keeps what was wrong: so `status` tells it, and a restart knows since when.
    """

    EVERY, KEPT = 2, 60  # seconds between looks, and between two that are written down
    RECENT = 300  # seconds that a refusal or what landed in erro stays news
    LANDED, REFUSED = 5, 3  # reasons that are named; refusals that are a problem
    TARGET = 60  # seconds a target may be in trouble
    KINDS = (
        *("destino", "file", "disk", "queue", "recusas", "erro", "age", "consumo"),
        "silence",
    )

    def __init__(self, settings, store, pressure, clock=time.monotonic):
        self.settings, self.store, self.pressure = settings, store, pressure
        self.clock = clock
        self.delivery = None
        self.found = ()  # all conditions, as of the last look
        self.dead = collections.Counter()  # in erro since an alarm told so
        self.trouble = Repeats(logging.WARNING, clock)
        self._refused = collections.deque()  # (when, reason)
        # (kind, name): since when it is so
        self._since = {(kind, name): at for kind, name, at, *_ in store.problems()}
        self._written = set(self._since), -math.inf  # what is in the file; since when
        self._due, self._landed = -math.inf, -math.inf
        self._totals, self._arrivals = {}, None
        self._arrived = self._claimed = clock()

    def refused(self, reason):
        """A sender was refused for what is wrong with its credentials or with us."""
        self._refused.append((self.clock(), reason))
        if len(self._refused) > 10_000:
            self._refused.popleft()

    def tick(self):
        now = self.clock()
        if now >= self._due:
            self._due = now + self.EVERY
            self.look(now)

    def look(self, now):
        wall, found = self.store.clock(), []
        try:
            for condition in self.conditions(now):
                found.append(self.dated(condition, wall))
            self.write_down(now, wall, found)
        except sqlite3.Error as error:
            kinds = {condition.kind for condition in found}
            found += [one for one in self.found if one.kind not in kinds]
            self.trouble("store", "what is wrong is not known: %s", safe_text(error))
        self.found = tuple(found)
        self.trouble.flush()

    def dated(self, condition, wall):
        key = condition.kind, condition.name
        if not condition.on:
            self._since.pop(key, None)
            return condition
        since = condition.since
        if since is None:
            since = self._since.get(key, wall)
        self._since[key] = since
        return condition._replace(since=since)

    def write_down(self, now, wall, found):
        """At once what begins or ends; what goes on once a minute."""
        wrong = [one for one in found if one.on]
        kinds, (before, when) = {(one.kind, one.name) for one in wrong}, self._written
        if kinds != before or (wrong and now - when >= self.KEPT):
            self.store.write_problems(
                (one.kind, one.name, int(one.since), int(wall), one.text)
                for one in wrong
            )
            self._written = kinds, now

    def conditions(self, now):
        """All of them, on or not; first those that do not read the file."""
        yield from self.targets()
        yield from self.pressed()
        yield self.refusals(now)
        self._totals, before = self.store.totals(), self._totals
        if self._totals.get("entregues") != before.get("entregues"):
            self._claimed = now
        due = self.store.oldest_due() or 0
        yield self.erro(now)
        if self.settings.alert_age:
            yield self.age(due, self.settings.alert_age)
        if not self.delivery or all(one.source for one in self.delivery.targets):
            yield self.nobody(now, due)
        if self.settings.alert_silence:
            yield self.silence(now, self.settings.alert_silence)

    def targets(self):
        for one in self.delivery.report() if self.delivery else ():
            lasts = one.get("desde") or 0
            on = bool(one.get("problema")) and lasts >= self.TARGET
            text = (
                f"{one['destino']} takes no messages for {lasts} s:"
                f" {one.get('ultimo_erro') or one['estado']}"
            )
            numbers = {"target": one["destino"], "condition": one["estado"]}
            numbers.update(seconds=lasts, waiting=one.get("esperando"))
            since = self.store.clock() - lasts
            yield Condition("destino", on, text, numbers, on, one["destino"], since)

    def pressed(self):
        now_is = self.pressure
        on = "DB_PATH" in now_is.causes
        yield Condition("file", on, now_is.text("DB_PATH"), {}, on)
        for kind, cause, number, limit in (
            ("disk", "MIN_FREE", "free", now_is.least),
            ("queue", "MAX_PENDING", "messages", now_is.most),
        ):
            on = cause in now_is.causes
            value = now_is.free if kind == "disk" else now_is.pending
            numbers = {number: value, "limit": limit}
            yield Condition(kind, on, now_is.text(cause), numbers, on)

    def refusals(self, now):
        """Trouble with the file is for ALERT_URL; wrong credentials are not, because
        any stranger could make such an alarm."""
        while self._refused and now - self._refused[0][0] >= self.RECENT:
            self._refused.popleft()
        reasons = collections.Counter(reason for _, reason in list(self._refused))
        count, storage = sum(reasons.values()), reasons["storage"] > 0
        shown = dict(reasons.most_common(self.LANDED))
        text = (
            f"senders were refused in the last five minutes: {count} ({listed(shown)})"
        )
        numbers = {"messages": count, "reasons": shown}
        return Condition(
            "recusas", storage or count >= self.REFUSED, text, numbers, storage
        )

    def erro(self, now):
        """What lies there is for people; it is an alarm until none has landed there for
        a while."""
        dead = self.store.dead()
        if dead != self.dead:
            self.dead, self._landed = dead, now
        count, reasons = sum(dead.values()), dict(dead.most_common(self.LANDED))
        text = (
            f"messages landed in erro since the last alarm: {count} ({listed(reasons)})"
        )
        numbers = {"messages": count, "reasons": reasons}
        lying, fresh = self._totals.get("erro", 0), now - self._landed < self.RECENT
        if lying and not fresh:
            text = f"messages lie in erro: {lying}"
        return Condition("erro", lying > 0, text, {**numbers, "lying": lying}, fresh)

    def told_dead(self):
        """What landed in erro is counted anew."""
        self.dead = self.store.dead(told=self.dead)

    def age(self, due, limit):
        text = (
            f"the oldest message that is due has waited {due} s, ALERT_AGE is {limit} s"
        )
        on, since = due > limit, self.store.clock() - due
        return Condition(
            "age", on, text, {"seconds": due, "limit": limit}, on, "", since
        )

    def nobody(self, now, due):
        """That messages wait for too long is told by `age`; this says why, sooner."""
        idle, limit = int(now - self._claimed), (self.settings.alert_age or 900) // 3
        waiting, since = self._totals.get("pendente", 0), self.store.clock() - idle
        text = f"nobody has claimed a message for {idle} s, and {waiting} wait"
        numbers = {"seconds": idle, "limit": limit, "messages": waiting}
        on = min(idle, due) > limit
        return Condition("consumo", on, text, numbers, False, "", since)

    def silence(self, now, limit):
        arrivals = self.store.arrivals()
        if arrivals != self._arrivals:
            if self._arrivals is not None:
                self._arrived = now
            self._arrivals = arrivals
        quiet = int(now - self._arrived)
        text = f"no message has come for {quiet} s, ALERT_SILENCE is {limit} s"
        on, since = quiet >= limit, self.store.clock() - quiet
        numbers = {"seconds": quiet, "limit": limit}
        return Condition("silence", on, text, numbers, on, "", since)

    def report(self):
        """What is wrong, for the page: the longest first, `desde` in seconds."""
        now = self.store.clock()
        wrong = sorted((one for one in self.found if one.on), key=lambda one: one.since)
        return [
            {
                "tipo": one.kind,
                "texto": one.text,
                "desde": max(0, round(now - one.since)),
                "destino": one.name or None,
                "numeros": one.numbers,
            }
            for one in wrong
        ]

    def families(self):
        counts = collections.Counter(one.kind for one in self.found if one.on)
        samples = [("", {"kind": kind}, counts[kind]) for kind in self.KINDS]
        yield "problems", "gauge", "What is wrong, by kind.", samples


def listed(reasons):
    return ", ".join(f"{number} x {reason!r}" for reason, number in reasons.items())


# The web application


class Reply:
    """A finished answer; `body` is bytes.

    With `wait` it is what to answer when nothing better comes in so many seconds, and
    requests with the same `wait_for` wait for the same. What comes `by_time` is not
    there sooner when something changes.
    """

    __slots__ = (
        *("body", "by_time", "code", "headers", "status", "wait", "wait_for"),
        "_head",
    )

    def __init__(
        self, code, body, kind, headers=(), wait=0, wait_for=None, by_time=False
    ):
        self.code, self.body, self.wait, self.wait_for = code, body, wait, wait_for
        self.by_time = by_time
        self.status = f"{code} {http.HTTPStatus(code).phrase}"
        length = str(len(body))
        self.headers = (("Content-Type", kind), ("Content-Length", length), *headers)
        if code == http.HTTPStatus.NO_CONTENT:
            self.headers = tuple(headers)
        self._head = None

    @classmethod
    def json(cls, body, **more):
        return cls(200, body + b"\n", "application/json", **more)

    @property
    def head(self):
        """In bytes, without what belongs to the connection; made once for those that
        are given again and again."""
        if self._head is None:
            lines = [f"HTTP/1.1 {self.status}", *map(": ".join, self.headers), ""]
            self._head = "\r\n".join(lines).encode("latin-1")
        return self._head

    def wsgi(self, environ, start_response):
        start_response(self.status, list(self.headers))
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else self.body]


class Refusal(Exception):
    """An answer that can be raised: one line of text. `reason` is what is counted."""

    def __init__(self, code, text, headers=(), reason=None):
        super().__init__(text)
        self.reason = reason or text
        kind = "text/plain; charset=utf-8"
        self.reply = Reply(code, f"{text}\n".encode(), kind, headers)


# Whatever goes wrong on this side: senders try again after a 503 and forget after a 4xx.
UNAVAILABLE = Refusal(503, "tente de novo mais tarde", [("Retry-After", "5")]).reply


class Pressure:
    """Whether senders have to wait, since the disk or the queue is nearly full.

    A full disk would stop the consumers too, and nobody could empty it.
    """

    def __init__(self, settings, store):
        self.least, self.most = settings.min_free, settings.max_pending
        self.store = store
        self.causes = ()  # the settings for whose sake they wait
        self.cause = None  # the first of them
        self.free = self.pending = 0  # as of the last look

    def look(self):
        before, self.causes = self.cause, tuple(self.found())
        self.cause = next(iter(self.causes), None)
        if self.cause and self.cause != before:
            log.warning("senders get 503: %s", self.text(self.cause))
            if self.cause == "DB_PATH":
                how = "it was removed or replaced. Before a stop, save what is open: %s"
                log.error(how, self.store.rescue())
        elif before and not self.cause:
            log.warning("senders are served again: %s", self.text(before))

    def found(self):
        """It ends with a tenth of room, or it would begin and end for ever."""
        least = self.least * (1.1 if "MIN_FREE" in self.causes else 1)
        most = self.most * (0.9 if "MAX_PENDING" in self.causes else 1)
        if least:
            self.free = self.store.free()
        if most:
            self.pending = int(self.store.pending())
        if self.store.is_replaced():
            yield "DB_PATH"
        if self.free < least:
            yield "MIN_FREE"
        if 0 < most <= self.pending:
            yield "MAX_PENDING"

    def text(self, cause):
        if cause == "DB_PATH":
            return "the file at DB_PATH is not the one that was opened"
        if cause == "MIN_FREE":
            free, least = self.free >> 20, self.least >> 20
            return f"the database's disk has {free} MiB free, MIN_FREE is {least} MiB"
        most = self.most
        return f"messages in the queue: {self.pending}, MAX_PENDING is {most}"


class Buckets:
    """Token buckets by client address; of 100,000 addresses the longest silent goes."""

    SIZE = 100_000

    def __init__(self, rate, burst, clock=time.monotonic):
        self.rate, self.burst, self.clock = rate, burst, clock  # per second, at once
        self._levels = collections.OrderedDict()  # address: (tokens, when)
        self._lock = threading.Lock()

    def take(self, address):
        """Takes a token if there is one. Seconds until there is, 0 when it was had."""
        with self._lock:
            now = self.clock()
            level, then = self._levels.pop(address, (self.burst, now))
            level = min(self.burst, level + (now - then) * self.rate)
            had = level >= 1
            self._levels[address] = level - had, now
            if len(self._levels) > self.SIZE:
                self._levels.popitem(last=False)
            return 0 if had else math.ceil((1 - level) / self.rate)


# Not the sender's, or not for the consumer: credentials, what belongs to the connection
# (RFC 9110 7.6.1), what proxies add and frameworks take for the path, method or client.
NOT_KEPT = re.compile(
    "x-token|authorization|proxy-.*|cookie"
    "|connection|keep-alive|te|trailer|transfer-encoding|upgrade|expect"
    "|forwarded|x-forward(ed)?(-.*)?|via|x-real-ip|true-client-ip|cf-.*|cdn-loop"
    "|x-original-.*|x-rewrite-.*|x-envoy-.*|x-host|x-http-method.*|x-method-override"
    "|(x-|x-cluster-|fastly-)?client-ip"
)


class Hidden:
    """What is not kept with a message, wherever a sender puts it: tokens, and secrets that
    are sent as they are. Shorter ones could be words; they start on loopback only."""

    SHORTEST = 16

    def __init__(self, tokens, sources):
        bare = [source for source in sources if not source.templates]
        names = (source.header.lower().replace("_", "-") for source in bare)
        self.headers = frozenset(names)
        words = {*tokens, *(key for source in bare for key in source.secrets)}
        words = [word.decode("latin-1") for word in words if len(word) >= self.SHORTEST]
        self.words = tuple({*words, *(quote_json(word)[1:-1] for word in words)})
        ways = [
            "".join(f"(?:{re.escape(c)}|(?i:%{ord(c):02x}))" for c in word)
            for word in words
        ]
        self.pattern = re.compile("|".join(ways) or "(?!)")

    def is_in(self, text):
        """Whether it may stand in headers as JSON, or in a piece of a target."""
        for word in self.words:
            if word in text:
                return True
        return "%" in text and self.pattern.search(text)

    def masked(self, text):
        if len(text) < self.SHORTEST or not self.is_in(text):
            return text
        return self.pattern.sub("***", text)


VISIBLE = "".join(map(chr, range(33, 127)))  # what may stand in a target (RFC 9112 3.2)
INVISIBLE = re.compile("[^!-~]")
ESCAPE = re.compile("%[0-9A-Fa-f]{2}|.", re.DOTALL)  # a byte of a path as it came


def escaped_target(text):
    """A piece of a target, as PEP 3333 gives it, as it may be sent on: most as it is."""
    if not INVISIBLE.search(text):
        return text
    return urllib.parse.quote(text.encode("latin-1"), VISIBLE)


to_json = json.JSONEncoder(separators=(",", ":")).encode  # dumps() makes one each time
quote_json = json.encoder.encode_basestring_ascii
quote_text = json.encoder.encode_basestring  # an emoji stays four bytes, not twelve


@functools.lru_cache(maxsize=256)
def environ_key(name):
    """'X-GitHub-Event' -> 'HTTP_X_GITHUB_EVENT', where WSGI has a header."""
    key = name.upper().replace("-", "_")
    return key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"


@functools.lru_cache(maxsize=256)  # senders repeat themselves
def kept_names(keys, without):
    """Triples ('HTTP_X_GITHUB_EVENT', 'x-github-event', '"x-github-event":')."""
    both = "CONTENT_(TYPE|LENGTH)$"  # some servers give them with HTTP_ as well
    headers = [key for key in keys if re.match(f"HTTP_(?!{both})|{both}", key)]
    names = [key.removeprefix("HTTP_").replace("_", "-").lower() for key in headers]
    pairs = [pair for pair in zip(headers, names) if pair[1] not in without]
    return [(k, n, f"{quote_json(n)}:") for k, n in pairs if not NOT_KEPT.fullmatch(n)]


class Request:
    """What handlers need of a WSGI environ (PEP 3333: text there is latin-1)."""

    _json = _query = ...  # not read yet
    suffix = ""  # what a sender appended to the token in the query, escaped
    place = None  # the Source that its path names
    source = None  # the same, if that signs
    raw = None  # the body, once it was read

    def __init__(self, environ):
        self.environ = environ
        self.method = environ["REQUEST_METHOD"]
        self.path = path = environ.get("PATH_INFO", "")
        if not path.isascii():
            self.path = path.encode("latin-1").decode("utf-8", "replace")

    @property
    def query(self):
        """{name: values} without the token. Bytes that are no UTF-8 become such as only
        encode again with "surrogateescape": they can be signed."""
        if self._query is ...:
            text = self.environ.get("QUERY_STRING", "").encode("latin-1")
            options = {"keep_blank_values": True, "errors": "surrogateescape"}
            text = text.decode(errors="surrogateescape")
            self._query = urllib.parse.parse_qs(text, **options) if text else {}
            self._query.pop("token", None)
        return self._query

    def in_query(self, name):
        """A credential's bytes from the query, or None. A plus stays one: it is part of
        many secrets, and a blank of none."""
        for pair in self.environ.get("QUERY_STRING", "").split("&"):
            key, _, value = pair.partition("=")
            if key == name:
                return urllib.parse.unquote_to_bytes(value.encode("latin-1"))
        return None

    def header(self, name):
        return self.environ.get(environ_key(name))

    @property
    def target(self):
        """Path and query as they came; servers name it differently, PEP 3333 not."""
        uri = self.environ.get("REQUEST_URI") or self.environ.get("RAW_URI")
        if uri:
            return re.sub("^[a-z]+://[^/?]*", "", uri)
        path = self.environ.get("SCRIPT_NAME", "") + self.environ.get("PATH_INFO", "")
        query = self.environ.get("QUERY_STRING")
        quoted = urllib.parse.quote(path, "/;=,:@!$&'()*+~", "latin-1")
        return f"{quoted}?{query}" if query else quoted

    def header_token(self):
        """From X-Token, or Authorization: Bearer (RFC 6750), as bytes; or None."""
        token = self.environ.get("HTTP_X_TOKEN")
        scheme, _, bearer = self.environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if not token and scheme.lower() == "bearer":
            token = bearer.strip()
        return token.encode("latin-1") if token else None

    def word(self, name):
        """The first value of a name in the query, or None."""
        text, *_ = self.query.get(name, [None])
        return text and text.encode(errors="surrogateescape").decode(errors="replace")

    def source_name(self):
        """`fonte` as names are kept, or None. Refusal 400 when it is empty: a variable
        that was not set must not mean all of them."""
        name = self.word("fonte")
        if name == "":
            raise Refusal(400, "fonte vazia")
        return name and name.lower().replace("_", "-")

    def number(self, name, low, high, default):
        """A whole number from the query; `default` when it is anything else."""
        text = self.word(name) or ""
        if re.fullmatch("[0-9]{1,18}", text) and low <= int(text) <= high:
            return int(text)
        return default

    def read(self, limit):
        """The body as it came, in bytes; it is `raw`, and `content` after inflate().

        Refusal 413 over `limit` bytes, 400 when it breaks off, 411 when nobody knows
        where it ends.
        """
        if self.raw is not None:
            return self.raw
        stream = self.environ["wsgi.input"]
        ends = self.environ.get("wsgi.input_terminated")  # the server knows where
        if "HTTP_TRANSFER_ENCODING" in self.environ and not ends:
            raise Refusal(411, "falta Content-Length")
        text = self.environ.get("CONTENT_LENGTH") or "0"
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise Refusal(400, "Content-Length inválido")
        length = int(text)
        if length > limit:
            raise Refusal(413, "payload grande demais")
        try:
            body = stream.read(limit + 1 if ends else length)
        except OSError:  # some servers raise when the client is gone
            body = b""
        if len(body) > limit:
            raise Refusal(413, "payload grande demais")
        if len(body) < length:
            raise Refusal(400, "corpo incompleto")
        self.raw = self.content = body
        return body

    def inflate(self, limit):
        """Sets `content`: the body without its Content-Encoding (RFC 9110 8.4), or as it
        came when it is not what that says. Refusal 413 over `limit` bytes, and over a
        hundred times its own: text is packed to a tenth, and 63 kB could be 64 MB."""
        limit = min(limit, max(1 << 20, 100 * len(self.raw)))
        coding = self.environ.get("HTTP_CONTENT_ENCODING", "").strip().lower()
        for wbits in CODINGS.get(coding, ()):
            with contextlib.suppress(zlib.error):
                size = 0
                for piece in inflated(self.raw, wbits):
                    size += len(piece)
                    if size > limit:
                        raise Refusal(413, "payload grande demais")
                self.content = b"".join(inflated(self.raw, wbits))
                break

    @property
    def json(self):
        """The value of a JSON body, or None. (A cached_property takes a lock in Python
        3.11, which is longer than the rest.)"""
        if self._json is ...:
            self._json = read_json(self.content)
        return self._json

    def kept_headers(self, hidden):
        """The sender's headers as a JSON object, names in lower case as in n8n."""
        values, without, names_of = self.environ, hidden.headers, kept_names
        options = values.get("HTTP_CONNECTION", "close").lower()
        if options not in ("close", "keep-alive"):  # it names others that belong to it
            without = without | {option.strip() for option in options.split(",")}
        if self.content is not self.raw:
            values = {**values, "CONTENT_LENGTH": str(len(self.content))}
            values.pop("HTTP_CONTENT_ENCODING")
        if len(values) >= 100 or without is not hidden.headers:
            names_of = kept_names.__wrapped__
        names = names_of(tuple(values), without)
        texts = [json_ + quote_json(values[key]) for key, _, json_ in names]
        text = "{" + ",".join(texts) + "}"
        if hidden.is_in(text):
            text = to_json({n: hidden.masked(values[key]) for key, n, _ in names})
        return text

    def kept_path(self, hidden):
        """The path below /webhook or the source, as it came; None for none."""
        path = self.params.get("rest")
        if path:
            path = self.as_it_came(path)
        if self.suffix:
            path = f"{(path or '').rstrip('/')}/{self.suffix}".lstrip("/")
        return hidden.masked(path) if path else None

    def as_it_came(self, rest):
        """The end of the path before its escapes were decoded, without a source's name."""
        is_plain = "%" not in self.environ.get("REQUEST_URI", "%") and rest.isascii()
        if not is_plain:  # what it is in bytes: "/webhook/" in front of it is ASCII
            rest = self.environ["PATH_INFO"][len(self.path) - len(rest) :]
        rest = rest.lstrip("/")
        if self.place:
            rest = rest.partition("/")[2].lstrip("/")
        if is_plain or not rest:
            return rest
        path = re.split("[?#]", self.target, maxsplit=1)[0]
        if "%" in path:
            path = ESCAPE.findall(path)
        came = escaped_target("".join(path[-len(rest) :]))
        if urllib.parse.unquote_to_bytes(came) == rest.encode("latin-1"):
            return came
        # the server has changed it
        return urllib.parse.quote(rest, "/;=,:@!$&'()*+", "latin-1")

    def kept_query(self, hidden):
        """The query as it came, without credentials; None for none."""
        text = self.environ.get("QUERY_STRING")
        if not text:
            return None
        without = ["token"]
        if self.source and not self.source.templates:
            without.append(self.source.header.removeprefix("?").lower())
        pairs = text.split("&")
        pairs = [pair for pair in pairs if query_name(pair).lower() not in without]
        text = escaped_target("&".join(pairs))
        return hidden.masked(text) if text else None


def read_json(body):
    """The value of a JSON text, or None; also of one with more than OBJECTS in it, or
    with a number that Python before 3.10.7 would work on for minutes."""
    if structure(body) > OBJECTS or has_long_number(body):
        return None
    try:
        text = body.decode()
        value, end = scan_json(text, 0)  # twice as fast as loads()
        if end == len(text):
            return value
    except (ValueError, StopIteration, RecursionError):
        pass  # blanks around it, UTF-16, no JSON
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(body)


scan_json = json.JSONDecoder().scan_once


FIELDS = 10_000  # of a form


def query_name(pair):
    """The name in a part of a query that was split at "&"."""
    return urllib.parse.unquote_plus(pair.partition("=")[0])


def flat(query):
    """parse_qs() as a JSON object; repeated names have a list, as in n8n. Or None."""
    values = {k: v[0] if len(v) == 1 else v for k, v in query.items()}
    return to_json(values) if values else None


CODINGS = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}  # zlib's wbits


def inflated(raw, wbits):
    """The pieces of a compressed body, up to 1 MiB each; zlib.error when it is none."""
    inflater, members = zlib.decompressobj(wbits), 1
    for start in range(0, len(raw), 65536):
        data = raw[start : start + 65536]
        while data:
            if inflater.eof:  # gzip files may follow each other (RFC 1952 2.2)
                inflater, members = zlib.decompressobj(wbits), members + 1
            if members > 1000:  # empty ones never reach the limit of bytes
                raise zlib.error("too many members")
            yield inflater.decompress(data, 1 << 20)
            data = inflater.unconsumed_tail or inflater.unused_data.lstrip(b"\0")
    yield inflater.flush()
    if not inflater.eof:
        raise zlib.error("cut off")


def is_utf8(body):
    if body.isascii():
        return True
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body), 65536):  # a str of it all can be four times it
            decoder.decode(body[start : start + 65536])
        decoder.decode(b"", final=True)
        return True
    except UnicodeDecodeError:
        return False


STRUCTURE = 1 << 20  # brackets and commas of what goes out as JSON, 16 bytes each then
OBJECTS = 1 << 18  # of what is read into objects here, which take 200 bytes and more
DEPTH = 500  # Python's own reader gives up at about 1,000
DIGITS = 4300  # in a row, behind which it refuses a number

STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
ONLY_DIGITS = bytes(48 if byte in b"0123456789" else 32 for byte in range(256))


def structure(body):
    return body.count(b",") + body.count(b"[") + body.count(b"{")


class Judge:
    """SQLite's reader of JSON: in C, strict, and without an object for each value."""

    def __init__(self):
        self.lock = threading.Lock()
        self.db = sqlite3.connect(":memory:", check_same_thread=False)

    def is_json(self, body):
        """Whether UTF-8 is JSON (RFC 8259) that ordinary readers take: without NaN,
        brackets 500 deep, and 4,300 digits in a row."""
        if structure(body) > STRUCTURE or b"\0" in body:  # SQLite stops at a NUL
            return False
        with self.lock:
            sql = "SELECT json_valid(CAST(? AS TEXT))"
            if not self.db.execute(sql, (body,)).fetchone()[0]:
                return False
        return not (is_deep(body) or has_long_number(body))


is_json = Judge().is_json


def is_deep(body):
    """Of JSON, whether its brackets are nested too deep."""
    if body.count(b"[") + body.count(b"{") <= DEPTH:
        return False
    steps = map(STEPS.__getitem__, without_strings(body).translate(None, NO_BRACKETS))
    return max(itertools.accumulate(steps), default=0) > DEPTH


def has_long_number(body):
    if len(body) <= DIGITS:
        return False
    long = b"0" * (DIGITS + 1)
    if long not in body.translate(ONLY_DIGITS):
        return False
    return long in without_strings(body).translate(ONLY_DIGITS)


def without_strings(body):
    """JSON less its strings. Escapes go first: a pattern that steps over them keeps
    hundreds of bytes for each, to go back to."""
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return re.sub(rb'"[^"]*"', b"", body)


def json_string(body):
    """UTF-8 as a JSON string, by pieces: a str of it all can be four times its size."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts = [
        quote_text(decoder.decode(body[at : at + 65536]))[1:-1].encode()
        for at in range(0, len(body), 65536)
    ]
    return b"".join([b'"', *parts, b'"'])


def payload_json(body):
    """(JSON text in bytes, whether it is base64) for a payload.

    JSON goes out as it came, never written anew. What an ordinary reader would choke on
    goes out as a string: one such message would make the whole batch unreadable.
    """
    if not is_utf8(body):
        return b'"%s"' % base64.b64encode(body), True
    return (body if is_json(body) else json_string(body)), False


def joined(**parts):
    """A JSON object, in bytes, of JSON texts; keys without one are left out."""
    texts = [
        f'"{key}":{value}'.encode()
        if type(value) is str
        else b'"%b":%b' % (key.encode(), value)  # large ones are not copied to and fro
        for key, value in parts.items()
        if value
    ]
    return b"{%b}" % b",".join(texts)


def quoted(value):
    """A text of the store as JSON; UnicodeEncodeError when it was no UTF-8 there."""
    if not value:
        return None
    if not value.isascii():
        value.encode()
    return quote_json(value)


def kept_json(text):
    """Headers of a row; ValueError when they are no JSON any more."""
    if text and not is_json(text.encode()):
        raise ValueError("headers are damaged")
    return text


def path_text(path):
    """A row's path without escapes, for people and routing keys; or None."""
    return path and urllib.parse.unquote(path).strip("/")


def query_json(query):
    """A row's query as a JSON object, or None; UnicodeEncodeError as quoted()."""
    if not query:
        return None
    query.encode()
    return flat(urllib.parse.parse_qs(query, keep_blank_values=True))


def moment(text):
    """A time of the store as RFC 3339."""
    return quoted(text and f"{text}Z".replace(" ", "T"))


def item_json(row, **more):
    """A row as an item: JSON in bytes."""
    payload, is_base64 = payload_json(row["body"])
    return joined(
        id=str(row["id"]),
        **{"payload": payload, **more},
        codificacao='"base64"' if is_base64 else None,
        tentativa=str(row["attempts"]),
        recebido_em=moment(row["created_at"]),
        fonte=quoted(row["source"]),
        metodo=quoted(row["method"]),
        caminho=quoted(path_text(row["path"])),
        evento=quoted(row["event_id"]),
        chave=quoted(row["group_key"]),
        headers=kept_json(row["headers"]),
        query=query_json(row["query"]),
    )


def item_n8n(row):
    """A row in the shape of n8n's Webhook node, whose `body` shows a form as object."""
    body, _ = payload_json(row["body"])
    headers = kept_json(row["headers"]) or "{}"
    kind = json.loads(headers).get("content-type", "")
    if kind.lower().startswith("application/x-www-form-urlencoded"):
        with contextlib.suppress(ValueError):  # one with more FIELDS stays text
            body = form_json(row["body"], kind) or "{}"
    return joined(
        id=str(row["id"]),
        tentativa=str(row["attempts"]),
        headers=headers,
        params="{}",
        query=query_json(row["query"]) or "{}",
        body=body,
    )


# Not every codec of Python: some take the square of the time, some are none of text.
CHARSET = re.compile(
    r"""(?i);\s*charset\s*=\s*["']?(utf-?8|(?:iso-?8859|windows|cp)-?[0-9]{1,4}"""
    r"""|latin-?[0-9]{1,2}|koi8-[ru]|shift_jis|euc-(?:jp|kr)|gbk|gb2312|gb18030|big5)\b"""
)


def form_json(body, kind):
    """A form as a JSON object, or None for an empty one: in the charset that its content
    type names, else in UTF-8, else in windows-1252. ValueError for too many fields."""
    options = {"keep_blank_values": True, "max_num_fields": FIELDS}
    text = body.decode("latin-1")  # a character for a byte, until all are decoded
    form = urllib.parse.parse_qs(text, encoding="latin-1", **options)
    for charset in (*CHARSET.findall(kind), "utf-8", "windows-1252"):
        with contextlib.suppress(UnicodeDecodeError, LookupError):
            return flat(recoded(form, charset, "strict"))
    # five bytes mean nothing in it
    return flat(recoded(form, "windows-1252", "replace"))


def recoded(form, charset, errors):
    def text(value):
        if value.isascii():
            return value
        return value.encode("latin-1").decode(charset, errors)

    return {text(name): [*map(text, values)] for name, values in form.items()}


def conversation_json(source, key, rows, shown):
    """A conversation with its messages, each `shown` as an item."""
    ids = ",".join([str(row["id"]) for row in rows])
    return joined(
        chave=quoted(key) or "null",
        fonte=quoted(source),
        ids=f"[{ids}]",
        mensagens=b"[%s]" % b",".join(map(shown, rows)),
    )


def history_json(tries):
    """The last ten attempts of a message, as it was written down (see TOLD)."""
    found, began = [], 0
    if len(tries or "") >= TOLD_LENGTH:  # its first line is cut
        tries = tries.partition("\n")[2]
    for line in re.findall("(?m)^([0-9]+) (\\w+) (.*)\n", tries or ""):
        when, what, text = int(line[0]), line[1], line[2]
        if what == "pegar":
            found.append({"em": f"{utc(when)}Z".replace(" ", "T"), "por": text or None})
            began = when
        elif found and "fim" not in found[-1]:
            found[-1] |= {"fim": what, "durou": when - began, "motivo": text or None}
        else:  # a person, between two attempts
            found.append({"em": f"{utc(when)}Z".replace(" ", "T"), "fim": what})
            found[-1]["motivo"] = text or None
    return to_json(found[-10:]) if found else None


def looked_json(row):
    """A row as an item of a list, with its status and times; a long payload is cut."""
    try:
        return whole_json(row)
    except ValueError:
        return whole_json(mended(row))


def whole_json(row):
    more = {"status": quoted(row["status"])}
    more["motivo"] = row["reason"] and quote_json(row["reason"])
    more["tamanho"] = str(row["size"])
    more["reservado_ate"] = moment(row["lease_until"])
    if row["status"] == "processando":
        more["consumidor"] = row["consumer"] and quote_json(row["consumer"])
    more["disponivel_em"] = moment(row["available_at"])
    more["resolvido_em"] = moment(row["settled_at"])
    more["historico"] = history_json(row["tries"])
    if len(row["body"]) < row["size"]:
        more["cortado"] = "true"
        with contextlib.suppress(UnicodeDecodeError):  # the last character may be cut
            text = codecs.getincrementaldecoder("utf-8")().decode(row["body"])
            row = {**dict(row), "body": text.encode()}
            more["payload"] = json.dumps(text)  # a piece of JSON is no JSON
    return item_json(row, **more)


def mended(row):
    """A row of which something is damaged, for a person to look at."""
    row = {**dict(row), "headers": None, "query": None}
    for name, value in row.items():
        if isinstance(value, str):
            row[name] = value.encode("utf-8", "surrogateescape").decode(
                errors="replace"
            )
    return row


class Unshown(Exception):
    """(id, why) of a message that cannot be shown."""


def unshown(error):
    return f"não pode ser mostrada: {safe_text(error)}"


class Full(Exception):
    """So many of a claim are all that an answer takes."""

    def __init__(self, count):
        super().__init__(count)
        self.count = count


ANYBODY, SENDER, CONSUMER, WATCHER = "anybody", "sender", "consumer", "watcher"

# path, method, handler, who may; the first path that fits decides
ROUTES = (
    ("/webhook", "POST", "webhook", SENDER),
    ("/webhook", "GET", "check_url", ANYBODY),
    ("/webhook/{rest}", "POST", "webhook", SENDER),
    ("/webhook/{rest}", "GET", "check_url", ANYBODY),
    ("/fila/pegar", "POST", "pegar", CONSUMER),
    ("/fila/processado", "POST", "processado", CONSUMER),
    ("/fila/erro", "POST", "erro", CONSUMER),
    ("/fila/devolver", "POST", "devolver", CONSUMER),
    ("/fila/estender", "POST", "estender", CONSUMER),
    ("/fila/reenviar", "POST", "reenviar", CONSUMER),
    ("/fila/{id}/processado", "POST", "processado", CONSUMER),
    ("/fila/{id}/erro", "POST", "erro", CONSUMER),
    ("/fila/{id}/devolver", "POST", "devolver", CONSUMER),
    ("/fila/{id}/estender", "POST", "estender", CONSUMER),
    ("/fila/{id}/reenviar", "POST", "reenviar", CONSUMER),
    ("/fila/{id}/payload", "GET", "payload", CONSUMER),
    ("/fila/{id}/{verdict}", "POST", "no_such_verdict", CONSUMER),
    ("/fila", "GET", "list", CONSUMER),
    ("/fila", "DELETE", "delete_many", CONSUMER),
    ("/fila/motivos", "GET", "motivos", CONSUMER),
    ("/fila/quantas", "GET", "count", CONSUMER),
    ("/fila/{id}", "GET", "look", CONSUMER),
    ("/fila/{id}", "DELETE", "delete", CONSUMER),
    ("/entrega/pausar", "POST", "pausar", CONSUMER),
    ("/entrega/retomar", "POST", "retomar", CONSUMER),
    ("/entrega/tentar", "POST", "tentar", CONSUMER),
    ("/health", "GET", "health", ANYBODY),
    ("/painel", "GET", "painel", ANYBODY),
    ("/painel/dados", "GET", "painel_dados", CONSUMER),
    ("/metrics", "GET", "metrics", WATCHER),
)


def compiled_routes(routes):
    """{path: {method: (handler, right, name)}}, and the paths as patterns."""
    paths = {}
    for path, method, handler, right in routes:
        paths.setdefault(path, {})[method] = handler, right, f"{method} {path}"
    patterns = []
    for path, methods in paths.items():
        text = path.replace("{rest}", "(?P<rest>.*)")  # it may hold slashes
        text = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", text)
        patterns.append((re.compile(text, re.DOTALL).fullmatch, methods))
    return paths, patterns


PATHS, PATTERNS = compiled_routes(ROUTES)


def find_methods(path):
    """({method: (handler, right, name)} or None, parameters) of a path."""
    if path in PATHS and "{" not in path:
        return PATHS[path], {}
    for fits, methods in PATTERNS:
        found = fits(path)
        if found:
            return methods, found.groupdict()
    return None, {}


class App:
    """Requests to replies, and errors to replies. It knows no SQL and no server."""

    OK = Reply.json(b'{"status":"ok"}')
    DUPLICATE = Reply.json(b'{"status":"duplicado"}')
    # once for all: anybody may ask for it, and read it slowly
    PAGE = Reply(200, PAGE.encode(), "text/html; charset=utf-8", PAGE_HEADERS)
    LONGEST_WAIT = 60  # seconds
    MANY = 5000  # messages that one verdict by filter takes
    COUNTED = 100_000  # messages that are counted
    SEARCH = 0.005  # seconds of one slice of a search, for which senders wait
    EVERY = 0.1  # seconds

    def __init__(self, settings, store, wall=time.time):
        """`wall` is the clock that senders' timestamps are compared with."""
        self.settings, self.store, self.wall = settings, store, wall
        self.sources = {
            name: Source(name, source, settings.public_url)
            for name, source in settings.sources
        }
        senders = settings.token + (settings.webhook_token or ())
        watchers = settings.token + (settings.metrics_token or ())
        self.good = {SENDER: senders, CONSUMER: settings.token, WATCHER: watchers}
        tokens = {*senders, *watchers}
        signing = [source for source in self.sources.values() if source.signs]
        self.hidden = Hidden(tokens, signing)
        self.delivery = None  # what pushes messages, if something does
        self.connections = None  # how many the server has
        self.times = {}  # route: Histogram of seconds from complete to answered
        self.shared = Histogram(NUMBERS)  # requests in one commit
        self.refused = Repeats(logging.WARNING)
        self.trouble = Repeats(logging.ERROR)
        self.wrong = Buckets(20 / 60, 20)  # credentials, of everybody
        rate = settings.rate_limit
        self.webhooks = Buckets(rate, 2 * rate) if rate else None
        self.pressure = Pressure(settings, store)
        self.watch = Watch(settings, store, self.pressure)
        self._due = -math.inf  # when tick() has something to do
        self._probed = -math.inf  # when the file took something

    def __call__(self, environ, start_response):
        """The WSGI application (PEP 3333)."""
        began = time.monotonic()
        reply = self.respond(environ)
        self.answered([environ.get("buffer.route")], time.monotonic() - began)
        return reply.wsgi(environ, start_response)

    def answered(self, routes, took):
        """Notes the seconds that requests took, by their routes; None is no route."""
        for route in set(routes):
            if route not in self.times:
                self.times[route] = Histogram(SECONDS)
            self.times[route].observe(took, routes.count(route))

    def respond(self, environ):
        """The reply to a request. It never raises, since others wait for theirs."""
        try:
            if "buffer.admitted" not in environ:
                self.admit(environ)
            request, handler = environ.pop("buffer.admitted")
            if request.source:
                self.verify(request)
            return handler(request)
        except Refusal as refusal:
            return self.refuse(refusal, environ)
        except (sqlite3.Error, OSError) as error:
            return self.failed(error)
        except Exception as error:  # noqa: BLE001 - our fault: try again, please
            where = trail(error)
            self.trouble(where, "answering 503, unexpected error: %s", where)
            return UNAVAILABLE

    def admit(self, environ):
        """Decides by its head alone who may bring a body; whether the sender is known
        then, since a source is by what it has signed. Refusal for all others."""
        request = Request(environ)
        handler, right = self.route(request)
        if right is not ANYBODY:
            self.authorize(request, right)
        if right is SENDER and self.pressure.cause:
            raise too_full(self.pressure.cause)
        environ["buffer.admitted"] = request, handler
        return right is not ANYBODY and not request.source

    def route(self, request):
        """(handler, right). Refusal 404, or 405 with Allow (RFC 9110 15.5.6).

        environ["buffer.route"] says under which name its time is counted."""
        methods, request.params = find_methods(request.path)
        if methods is None:
            raise Refusal(404, "página não encontrada")
        wanted = "GET" if request.method == "HEAD" else request.method
        if wanted not in methods:
            raise not_allowed(methods)
        handler, right, request.environ["buffer.route"] = methods[wanted]
        return getattr(self, handler), right

    def authorize(self, request, right):
        """Refusal 401 without a token for this; compared as bytes, in constant time.

        For a source its signature is the credential, and a token does not replace it:
        verify() needs the body.

        Evolution API with "webhook by events" appends the event to the whole URL as
        text: /webhook?token=T/messages-upsert. What follows the token counts as path.
        """
        if right is SENDER and self.sources:
            request.place = self.source(request)
            if request.place and request.place.signs:
                request.source = request.place
                return
        good, header = self.good[right], request.header_token()
        given = header or request.in_query("token") or b""
        fits = [token for token in good if hmac.compare_digest(given, token)]
        if fits:
            return
        if right is SENDER and not header:
            for token in good:
                head, rest = given[: len(token) + 1], given[len(token) + 1 :]
                if hmac.compare_digest(head, token + b"/"):
                    rest = rest.strip(b"/")
                    request.suffix = urllib.parse.quote(rest, "/;=,:@!$&'()*+")
                    return
        raise Refusal(401, "não autorizado", reason="token")

    def source(self, request):
        """The Source that a path names, or None."""
        name = request.params.get("rest", "").lstrip("/").partition("/")[0]
        return self.sources.get(name.upper().replace("-", "_"))

    def verify(self, request):
        """Refusal 401 unless the request's source has signed it."""
        source = request.source
        request.read(self.settings.max_body)
        if is_first_ping(request):
            return
        try:
            source.verify(request, self.wall())
        except BadSignature as why:
            reason = f"{why} {source.name}"
            raise Refusal(401, "não autorizado", reason=reason) from None

    def webhook(self, request):
        """A plain webhook or a source's; what a provider asks to check the URL first."""
        self.limit_rate(request)
        settings, source, place = self.settings, request.source, request.place
        request.read(settings.max_body)
        request.inflate(settings.max_body)
        answer = handshake(request)
        if answer:
            return answer
        if not request.content:
            raise Refusal(400, "payload inválido")
        words = (source.id_word,) if source else settings.dedupe
        keys = settings.group_key
        if place and place.group_key is not None:
            keys = place.group_key
        name = place and place.name
        event_id = None if "-" in words else find_id(words, request)
        if source and event_id and not source.signs_id:
            event_id = self.store.own_id(name, event_id, request.content)
        if self.delivery and request.header("X-Buffer-De") == self.store.file_id:
            self.trouble("loop", "FORWARD_URL leads back to this buffer.py")
            raise Refusal(508, "a entrega volta para cá", reason="loop")
        is_new = self.store.webhook(
            request.content,
            is_utf8(request.content),
            source=name,
            event_id=event_id,
            group_key=find_first(keys, request) if keys else None,
            method=request.method,
            path=request.kept_path(self.hidden),
            query=request.kept_query(self.hidden),
            headers=request.kept_headers(self.hidden),
        )
        return self.OK if is_new else self.DUPLICATE

    def limit_rate(self, request):
        if self.webhooks:
            wait = self.webhooks.take(self.client(request.environ))
            if wait:
                raise too_many(wait, "RATE_LIMIT")

    def check_url(self, request):
        """Meta checks a URL by GET before it sends; every other GET is refused."""
        wanted = self.settings.verify_token
        source = self.source(request)
        meta = wanted and (not source or not source.signs or source.preset == "meta")
        challenge = request.word("hub.challenge")
        if not meta or challenge is None or request.method == "HEAD":
            raise not_allowed(["POST"])
        given = (request.word("hub.verify_token") or "").encode()
        if not hmac.compare_digest(given, wanted):
            raise Refusal(403, "proibido", reason="VERIFY_TOKEN")
        return echo(challenge)

    def pegar(self, request):
        """A batch. With `espera`, under our own server, the answer can wait:
        environ["buffer.wait"] is "later" when it comes and "now" when there is news."""
        when = request.environ.get("buffer.wait")
        wait = request.number("espera", 1, 10**9, default=0) if when else 0
        wait, settings = min(wait, self.LONGEST_WAIT), self.settings
        how = {
            "source": request.source_name(),
            "in_work": request.number("max", 0, 10**9, default=None),
            "consumer": self.consumer(request),
            **self.grouping(request),
        }
        by_time = how.get("quiet", 0) > 0  # no new message makes a conversation quiet
        wait_for = tuple(how.items())
        waits = {"wait": wait, "wait_for": wait_for, "by_time": by_time}
        nothing = Reply.json(b"[]", headers=PRIVATE, **waits)
        if how["consumer"] and when != "now":  # what it had not settled comes first
            self.store.lost(how["consumer"])
        if wait and when == "later":
            return nothing
        shown = item_n8n if request.word("formato") == "n8n" else item_json
        claim = functools.partial(
            self.store.pegar_conversas if "quiet" in how else self.store.pegar,
            lease=request.number("reserva", 1, 604800, default=settings.lease),
            max_bytes=settings.max_batch_bytes,
            **how,
        )
        limit = request.number("limite", 1, 500, default=50)
        items = self.batch(claim, limit, shown, by_time)
        return Reply.json(items, headers=PRIVATE) if items else nothing

    def batch(self, claim, limit, shown, as_conversations):
        """The items of a claim as JSON, or None. What cannot be shown goes to erro, alone;
        what would make the answer too large stays for the next claim."""
        while True:
            failed = None
            try:
                with self.store.transaction():  # what is not shown is not given out
                    return self.items(claim(limit), shown, as_conversations)
            except Full as full:
                limit = full.count
            except Unshown as error:
                failed = error.args
            if failed:  # out there the memory is free again
                self.store.erro([failed[0]], reason=failed[1])

    def items(self, found, shown, as_conversations):
        """What was claimed as JSON, or None for nothing. Full, once it is more than an
        answer takes; Unshown for what cannot be."""
        room, parts = (
            self.settings.max_batch_bytes + (1 << 20),
            [],
        )  # that is for headers
        for one in found:
            who, rows = (one[:2], one[2]) if isinstance(one, tuple) else (None, [one])
            items = {}
            for row in rows:
                try:
                    items[row["id"]] = shown(row)
                except Exception as error:  # noqa: BLE001 - whatever it is, others wait
                    if parts and isinstance(error, MemoryError):
                        raise Full(len(parts)) from None
                    raise Unshown(row["id"], unshown(error)) from None
            room -= sum(map(len, items.values()))
            if parts and room < 0:
                raise Full(len(parts))
            if as_conversations:
                parts.append(
                    conversation_json(*who, rows, lambda row: items[row["id"]])  # noqa: B023 - at once
                )
            else:
                parts += items.values()
        return b"[%s]" % b",".join(parts) if parts else None

    def consumer(self, request):
        """`consumidor`, who claims; None for somebody without a name."""
        name = request.word("consumidor")
        if name is not None and not 0 < len(name) <= 100:
            raise Refusal(400, "consumidor deve ter de 1 a 100 caracteres")
        return name

    def grouping(self, request):
        """What `agrupar` and `serie` mean to the store; {} for plain messages.

        Refusal 400 for what they cannot mean, since who asks for conversations must not
        be given messages.
        """
        serial = request.word("serie")
        if serial not in (None, "0", "1"):
            raise Refusal(400, "serie deve ser 0 ou 1")
        given = {}
        for name in ("agrupar", "ate"):
            given[name] = request.number(name, 1, 604800, default=None)
            if given[name] is None and request.word(name) is not None:
                raise Refusal(
                    400, f"{name} deve ser um número de segundos, de 1 a 604800"
                )
        quiet, longest = given["agrupar"], given["ate"]
        if quiet:
            return {"quiet": quiet, "longest": longest or 6 * quiet}
        if longest:
            raise Refusal(400, "ate só vale com agrupar")
        return {"quiet": 0, "single": True} if serial == "1" else {}

    def processado(self, request):
        if self.by_filter(request):
            return self.settle_all(request, "processado", ("pendente", "erro"))
        return self.settle(request, "processado", self.store.processado)

    def erro(self, request):
        if self.by_filter(request):
            return self.settle_all(request, "erro", ("pendente",))
        reason = self.reason(request)
        return self.settle(request, "erro", self.store.erro, reason=reason)

    def devolver(self, request):
        """Without a delay it brings forward what is delayed."""
        if self.by_filter(request):
            return self.settle_all(request, "antecipar", ("pendente",))
        delay = request.number("em", 0, 31536000, default=None)
        values = {"reason": self.reason(request), "delay": delay}
        method = self.store.antecipar if delay == 0 else self.store.devolver
        return self.settle(request, "pendente", method, **values)

    def estender(self, request):
        lease = request.number("segundos", 1, 604800, default=self.settings.lease)
        return self.settle(request, "processando", self.store.estender, lease=lease)

    def reenviar(self, request):
        if self.by_filter(request):
            return self.settle_all(request, "reenviar", ("erro", "processado"))
        reply = self.settle(request, "pendente", self.store.reenviar)
        self.noted(request, "replayed message %s", request.params.get("id", "by ids"))
        return reply

    def by_filter(self, request):
        """Whether it is for all of a status."""
        return "id" not in request.params and request.word("status") is not None

    def settle_all(self, request, verb, statuses):
        """A verdict for all that a filter lets through, in bites: see README."""
        status = request.word("status")
        if status not in statuses:
            raise Refusal(400, f"status deve ser {' ou '.join(statuses)}")
        known = {"status", "fonte", "motivo", "parecido", "adiadas", "desde", "ate"}
        forward = verb == "antecipar"  # of delayed ones, and at once
        unknown = request.query.keys() - known - ({"em"} if forward else set())
        if unknown or request.read(self.settings.max_body):  # a slip would mean all
            raise Refusal(400, f"só {', '.join(sorted(known))}, sem corpo")
        if forward and (request.word("em"), request.word("adiadas")) != ("0", "1"):
            raise Refusal(400, "devolver por filtro: só adiadas=1 e em=0")
        where = self.chosen(request)
        done = {"delay": 0} if forward else {}
        with self.store.transaction():
            rows = self.store.list([status], limit=self.MANY, **where)
            # what is erased is written over
            ids = fitting(rows, self.MANY, (4 if verb == "apagar" else 64) << 20)
            getattr(self.store, verb)(ids, **done)
            more = bool(self.store.list([status], limit=1, **where))
        self.noted(request, "%s by filter, %d messages", verb, len(ids))
        names = {"reenviar": "pendente", "antecipar": "pendente", "apagar": "apagada"}
        answer = {"status": names.get(verb, verb), "quantidade": len(ids), "mais": more}
        return Reply.json(to_json(answer).encode())

    def chosen(self, request):
        """What a filter in the query means to Store.list(), but for the status.
        Refusal 400 for what it cannot mean."""
        where = {"source": request.source_name(), "reason": self.failed_for(request)}
        if request.word("adiadas") not in (None, "1"):
            raise Refusal(400, "adiadas deve ser 1")
        where["delayed"] = request.word("adiadas") == "1"
        if where["delayed"] and request.word("status") != "pendente":
            raise Refusal(400, "adiadas só com status=pendente")
        return {**where, **self.period(request)}

    def period(self, request):
        """`desde`, a time, and `ate`, a time or an id, as ids."""
        where = {}
        since, until = request.word("desde"), request.word("ate")
        if since is not None:
            where["after"] = self.store.last_before(utc(moment_of(since, "desde")))
        if until is not None and re.fullmatch("[0-9]{1,18}", until) and int(until):
            where["until"] = int(until)
        elif until is not None:  # to the end of that second
            end = utc(moment_of(until, "ate") + 1)
            where["until"] = self.store.last_before(end)
        return where

    def count(self, request):
        """How many a filter lets through, up to COUNTED, and the last of their ids."""
        status = request.word("status")
        if status not in STATUSES:
            raise Refusal(400, f"status deve ser um de {', '.join(STATUSES)}")
        where = self.chosen(request)
        number, last = self.store.count([status], self.COUNTED, **where)
        answer = {"quantidade": number, "ate": last, "mais": number >= self.COUNTED}
        return Reply.json(to_json(answer).encode(), headers=PRIVATE)

    def no_such_verdict(self, request):
        raise Refusal(
            400, "status deve ser processado ou erro, devolver, estender ou reenviar"
        )

    def reason(self, request):
        """Why it failed: the first 2,000 bytes of a text body, in a batch `motivo`."""
        body = request.read(self.settings.max_body)
        if "id" not in request.params:
            value = request.json if isinstance(request.json, dict) else {}
            body = str(value.get("motivo") or "").encode("utf-8", "replace")
        return body[:2000].decode("utf-8", "ignore").strip() or None

    def settle(self, request, status, method, **values):
        """One verdict for one message or, in one transaction, for many.

        Settling twice is 200, because n8n's "Retry On Fail" repeats all of its items.
        """
        fence = request.word("tentativa")
        if fence is not None:
            values["attempt"] = request.number("tentativa", 0, 10**9, default=None)
            if values["attempt"] is None:
                raise Refusal(400, "tentativa inválida")
        if "id" not in request.params:
            return self.settle_many(request, status, method, **values)
        id_ = self.id(request)
        outcome = method([id_], **values)[id_]
        if outcome.refused:
            code = 404 if outcome.refused == "unknown" else 409
            raise Refusal(code, excuse(outcome), reason=outcome.refused)
        return Reply.json(b'{"status":"%s"}' % outcome.status.encode())

    def settle_many(self, request, status, method, **values):
        ids = self.ids(request)
        outcomes = method(ids, **values)
        answer = {
            "status": status,
            "ids": [id_ for id_ in ids if not outcomes[id_].refused],
            "ignorados": [
                {"id": id_, "motivo": excuse(outcome)}
                for id_, outcome in outcomes.items()
                if outcome.refused
            ],
        }
        used_up = [id_ for id_ in answer["ids"] if outcomes[id_].status != status]
        if used_up:  # devolver at the last attempt
            answer["esgotados"] = used_up
        return Reply.json(to_json(answer).encode())

    def ids(self, request):
        """The ids of a batch, each once; Refusal 400 unless it is {"ids":[1,2]}."""
        request.read(self.settings.max_body)
        value = request.json if isinstance(request.json, dict) else {}
        ids = value.get("ids")
        if not isinstance(ids, list) or len(ids) > 1000:
            raise Refusal(400, 'o corpo deve ser {"ids":[...]}, até 1000 ids')
        texts = [str(id_) for id_ in ids]
        if not all(re.fullmatch("-?[0-9]{1,30}", text) for text in texts):
            raise Refusal(400, "id inválido")
        return list(dict.fromkeys(map(int, texts)))

    def id(self, request):
        """A message's id. Refusal 400 for no number; what no row can have is unknown."""
        text = request.params["id"]
        if not re.fullmatch("[+-]?[0-9]+", text):
            raise Refusal(400, "id inválido")
        return int(text) if len(text) <= 18 else -1

    def list(self, request):
        status, source = request.word("status"), request.source_name()
        if status not in (None, *STATUSES):
            raise Refusal(400, f"status deve ser um de {', '.join(STATUSES)}")
        event, order = request.word("evento"), request.word("ordem")
        if order not in (None, "asc", "desc"):
            raise Refusal(400, "ordem deve ser asc ou desc")
        statuses = [status] if status else STATUSES
        if request.word("busca") is not None:
            return self.search(request, statuses)
        if event is None:
            after = request.number("depois", 0, 10**18, default=None)
            where = self.chosen(request)
            if order == "desc" and after is not None:
                where["until"] = min(after - 1, where.get("until", after))
            elif after is not None:
                where["after"] = max(after, where.get("after", 0))
            limit = request.number("limite", 1, 500, default=50)
            rows = self.store.list(statuses, limit, order == "desc", **where)
        elif request.query.keys() & {"status", "motivo", "depois"}:
            raise Refusal(400, "evento só com fonte")
        else:
            rows = self.store.evento(event, source)
        return Reply.json(b"[%s]" % self.shown(request, rows), headers=PRIVATE)

    def shown(self, request, rows):
        whole, shown, size = request.word("completo") == "1", [], 0
        looked = self.store.look_through(rows)
        if whole:
            looked = self.store.look([row["id"] for row in rows], whole)
        for row in looked:
            size += len(row["body"])
            if shown and size > self.settings.max_batch_bytes:
                break
            shown.append(looked_json(row))
        return b",".join(shown)

    def search(self, request, statuses):
        """The newest messages that hold `busca`, a slice at a time: `ate` is where the
        next one goes on. In the first, what has it as its id or event id comes first."""
        text, where = request.word("busca").strip(), self.chosen(request)
        if not 0 < len(text) <= 200:
            raise Refusal(400, "busca deve ter de 1 a 200 caracteres")
        exact = {row["id"] for row in self.store.evento(text)}
        exact |= {int(text)} if re.fullmatch("[0-9]{1,18}", text) else set()
        find = finder(text).search

        def fits(row):
            others = row["event_id"], row["group_key"], path_text(row["path"])
            known = "\n".join(filter(None, others)).encode("utf-8", "replace")
            return row["id"] not in exact and (find(row["body"]) or find(known))

        limit, first = request.number("limite", 1, 500, default=50), []
        if "until" not in where or not request.word("ate").isdecimal():
            for id_ in sorted(exact, reverse=True):  # through the same filter
                low, high = where.get("after", 0), where.get("until", id_)
                one = {**where, "after": max(low, id_ - 1), "until": min(high, id_)}
                first += self.store.list(statuses, **one)
        rows, until = self.store.search(fits, statuses, self.SEARCH, limit, **where)
        ate = str(until) if until else "null"
        items = b"[%s]" % self.shown(request, first + rows)
        return Reply.json(joined(mensagens=items, ate=ate), headers=PRIVATE)

    def failed_for(self, request):
        """`motivo`, exactly: "" for messages without one, None when it is not asked;
        with `parecido` a list of those that differ from it in numbers alone."""
        exact, alike = request.word("motivo"), request.word("parecido")
        if (exact is not None or alike) and request.word("status") != "erro":
            raise Refusal(400, "motivo e parecido só com status=erro")
        if alike == "":  # a variable that was not set must not mean all of them
            raise Refusal(400, "parecido vazio")
        if not alike:
            return exact
        form = without_numbers(alike)
        return [one for one in self.store.reasons() if without_numbers(one) == form]

    def motivos(self, request):
        """Why messages are in erro: the commonest reasons, or how many have `motivo`;
        with `agrupar` those that differ in numbers alone are one."""
        source, reason = request.source_name(), request.word("motivo")
        grouped = request.word("agrupar") == "1"
        where = self.period(request)
        limit = 10**6 if grouped else 50
        rows = self.store.motivos(source, reason, limit, **where)
        names = ("motivo", "quantidade", "ate")
        answer = [dict(zip(names, row)) for row in rows]
        if grouped:
            answer = alike(answer)[:200]
        return Reply.json(to_json(answer).encode(), headers=PRIVATE)

    def look(self, request):
        whole = request.word("completo") != "0"
        for row in self.store.look([self.id(request)], whole=whole):
            return Reply.json(looked_json(row), headers=PRIVATE)
        raise Refusal(404, "mensagem não encontrada")

    def payload(self, request):
        """The body as it came, as a file that no browser opens."""
        id_ = self.id(request)
        for row in self.store.look([id_], whole=True):
            name = f'attachment; filename="mensagem-{id_}"'
            headers = (*PRIVATE, ("Content-Disposition", name))
            return Reply(200, bytes(row["body"]), "application/octet-stream", headers)
        raise Refusal(404, "mensagem não encontrada")

    def noted(self, request, what, *values):
        """Logs what a person does that a machine does not."""
        log.info("%s from %s", what % values, named(self.client(request.environ)))

    def delete(self, request):
        if not self.store.delete(self.id(request)):
            raise Refusal(404, "mensagem não encontrada")
        self.noted(request, "erased message %d", self.id(request))
        return Reply(204, b"", None)

    def delete_many(self, request):
        return self.settle_all(request, "apagar", ("pendente", "processado", "erro"))

    def pausar(self, request):
        return self.on_targets(request, "pausar", lambda target: target.pause(True))

    def retomar(self, request):
        return self.on_targets(request, "retomar", lambda target: target.pause(False))

    def tentar(self, request):
        return self.on_targets(request, "tentar", lambda target: target.try_now())

    def on_targets(self, request, verb, act):
        """Something for the target `destino`, or for all."""
        name = request.word("destino")
        try:
            targets = self.delivery.named(name) if self.delivery else []
        except LookupError:
            targets = []
        if not targets:
            raise Refusal(404, "destino não encontrado")
        for target in targets:
            act(target)
            self.store.keep_target(target.name, target.facts())
            self.noted(request, "%s %s", verb, target.name)
        self.delivery.wake()
        return self.OK

    def health(self, request):
        if self.pressure.cause:
            raise too_full(self.pressure.cause)
        if time.monotonic() >= self._probed + 1:  # anybody may ask, and it syncs
            self.store.probe()
            self._probed = time.monotonic()
        return self.OK

    def metrics(self, request):
        times = {route or "none": one for route, one in self.times.copy().items()}
        histograms = (
            ("request_seconds", "From complete to answered.", "route", times),
            ("commit_seconds", "Commits that wrote.", "", {"": self.store.commits}),
            ("commit_requests", "Requests in one commit.", "", {"": self.shared}),
        )
        self.watch.look(self.watch.clock())
        found = [*families(self.store.report(), histograms), *self.watch.families()]
        if self.connections:
            count = [("", {}, self.connections())]
            found.append(("connections", "gauge", "Open connections.", count))
        if self.delivery:
            found += delivery_families(self.delivery.report())
        kind = "text/plain; version=0.0.4; charset=utf-8"
        text = exposition(found).encode(errors="replace")  # a source may be damaged
        return Reply(200, text, kind, PRIVATE)

    def painel(self, request):
        """The page, for anybody: it holds no data."""
        return self.PAGE

    def painel_dados(self, request):
        """What the page shows on top."""
        self.watch.look(self.watch.clock())
        delivery = self.delivery and self.delivery.report()
        answer = {**self.store.report(), "entrega": delivery, "versao": __version__}
        answer |= {"problemas": self.watch.report(), "maquina": socket.gethostname()}
        step = {"dia": 10, "semana": 60}.get(request.word("periodo"))
        if step:
            answer["por_periodo"] = self.store.history(step)
        return Reply.json(to_json(answer).encode(), headers=PRIVATE)

    def client(self, environ):
        return client_address(environ, self.settings.trusted_proxy)

    def refuse(self, refusal, environ):
        """The reply to a refusal, which is counted by its reason and logged.

        Whoever shows too many wrong credentials gets 429 for the next wrong ones. The
        right one is always served: behind a proxy all have the same address.
        """
        client = self.client(environ)
        wait = self.wrong.take(client) if refusal.reply.code in (401, 403) else 0
        if wait:
            refusal = too_many(wait, refusal.reason)
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        path = re.split("[?&;=]", path, maxsplit=1)[0]  # a token can follow %3F
        for token in {*self.good[SENDER], *self.good[WATCHER]}:
            path = path.replace(token.decode("latin-1"), "***")
        path = path[:80]
        method, line = method[:16], "%d %s: %s %r from %s"
        code, reason = refusal.reply.code, refusal.reason
        self.refused(reason, line, code, reason, method, path, named(client))
        self.store.refused(reason)
        if path.startswith("/webhook") and code in (401, 403, 503):
            self.watch.refused(reason)
        return refusal.reply

    def dropped(self, count, limit):
        """Notes that connections were closed for others."""
        line = "at the limit of %d connections, those go that have got nothing done"
        self.trouble("connections", line, limit, times=count)
        for _ in range(count):
            self.store.refused("connections")

    def tick(self, now):
        """What has to be looked at now and then; called often, by the server after each
        round. `now` in monotonic seconds."""
        if now < self._due:
            return
        self._due = now + self.EVERY
        self.flush()
        try:
            self.pressure.look()
        except (sqlite3.Error, OSError) as error:  # nobody is refused for that
            self.trouble("look", "cannot look at the disk: %s", safe_text(error))
        self.watch.tick()

    def flush(self, **gap):
        """Logs what was kept back as a repetition."""
        for repeats in (self.refused, self.trouble, self.store.used_up):
            repeats.flush(**gap)

    def failed(self, error):
        """Logs trouble with the store; the reply for those who depended on it."""
        self.trouble("storage", "answering 503, storage trouble: %s", safe_text(error))
        self.store.refused("storage")
        self.watch.refused("storage")
        return UNAVAILABLE


def moment_of(text, name):
    """Seconds since the epoch of an RFC 3339 time, UTC when it does not say; else
    Refusal 400."""
    with contextlib.suppress(ValueError, OverflowError):
        zone = "" if re.search(r"[+-]\d\d:\d\d$", text) else "+00:00"
        when = re.sub("[Zz ]$", "", text)  # Python 3.10 takes no Z
        return datetime.datetime.fromisoformat(when + zone).timestamp()
    raise Refusal(400, f"{name} inválido")


def without_numbers(reason):
    """A reason as those look that differ from it in numbers alone: ids, times, ports. A
    number from 100 to 599 stays, since that may be a status."""
    return re.sub(r"\b(?=\w*\d)\w{8,}\b|(?<!\d)(?![1-5]\d\d(?!\d))\d+", "#", reason)


def alike(reasons):
    """Entries of motivos, the commonest first, merged where they differ in numbers
    alone; `motivos` says how many there were, `motivo` the commonest."""
    found = {}
    for one in reasons:
        form = one["motivo"] and without_numbers(one["motivo"])
        same = found.setdefault(form, {**one, "quantidade": 0, "motivos": 0})
        same["quantidade"] += one["quantidade"]
        same["ate"] = max(same["ate"], one["ate"])
        same["motivos"] += 1
    return sorted(found.values(), key=lambda one: -one["quantidade"])


def finder(text):
    """A pattern that finds a text in bytes: in UTF-8 or as JSON escapes it, in upper or
    lower case."""
    parts = []
    for char in text:
        forms = {char, char.lower(), char.upper()}
        ways = {form.encode("utf-8", "replace") for form in forms}
        if not char.isalnum() or not char.isascii():
            ways |= {json.dumps(form)[1:-1].encode() for form in forms}
            ways |= {f"\\u{ord(f):04x}".encode() for f in forms if len(f) == 1}
        if char == "/":
            ways.add(b"\\/")
        parts.append(b"(?:%s)" % b"|".join(map(re.escape, sorted(ways))))
        if len(ways) == 1:
            parts[-1] = re.escape(char.encode())
    ignore = re.IGNORECASE if re.search("[A-Za-z]|[^ -~]", text) else 0
    return re.compile(b"".join(parts), ignore)


def not_allowed(methods):
    """A GET on /webhook is only there for a handshake, which nobody else need know."""
    allow = "POST" if "POST" in methods else ", ".join(methods)
    return Refusal(405, "método não permitido", [("Allow", allow)])


def too_many(wait, reason):
    headers = [("Retry-After", str(wait))]
    return Refusal(429, "requisições demais", headers, reason=reason)


def too_full(cause):
    headers = [("Retry-After", "30")]
    return Refusal(503, "tente de novo mais tarde", headers, reason=cause)


def echo(text):
    """A provider's challenge: as text that no browser runs, and not just anything."""
    if not re.fullmatch("[ -~]{1,1024}", text):
        raise Refusal(400, "desafio inválido")
    nosniff = [("X-Content-Type-Options", "nosniff")]
    return Reply(200, text.encode(), "text/plain; charset=utf-8", nosniff)


def is_first_ping(request):
    """WooCommerce's, unsigned, when a webhook is saved: nothing but webhook_id=1."""
    source = request.source
    unsigned = source.preset == "woocommerce" and not source.given(request)
    return unsigned and re.fullmatch(rb"webhook_id=[0-9]+", request.raw)


def handshake(request):
    """The answer to a provider that checks the URL, which is no message; else None.

    Slack: https://api.slack.com/events/url_verification; Zoom: "Validate your webhook
    endpoint"; Microsoft Graph: "Receive change notifications through webhooks".
    """
    if request.source is None:
        ask = not request.raw and request.word("validationToken")
        return echo(ask) if ask else None
    preset = request.source.preset
    if is_first_ping(request):
        return App.OK
    value = request.json if preset in ("slack", "zoom") else None
    if not isinstance(value, dict):
        return None
    if preset == "slack" and value.get("type") == "url_verification":
        return echo(str(value.get("challenge")))
    if preset == "zoom" and value.get("event") == "endpoint.url_validation":
        plain = find_word("$.payload.plainToken", request) or ""
        plain = plain.encode("utf-8", "replace").decode()
        mac = hmac.digest(request.source.secrets[0], plain.encode(), "sha256").hex()
        answer = {"plainToken": plain, "encryptedToken": mac}
        return Reply.json(to_json(answer).encode())
    return None


def excuse(outcome):
    """Why a message was not settled, for a person to read."""
    if outcome.refused == "unknown":
        return "mensagem não encontrada ou não está em processamento"
    if outcome.refused == "superseded":
        return f"mensagem entregue de novo: está na tentativa {outcome.attempts}"
    return f"mensagem já está em {outcome.status}"


def client_address(environ, trusted):
    """The peer, or the nearest X-Forwarded-For hop that is no trusted proxy."""
    address = environ.get("REMOTE_ADDR", "")
    hops = environ.get("HTTP_X_FORWARDED_FOR", "").split(",") if trusted else []
    hops = [without_port(hop.strip()) for hop in hops if hop.strip()]
    while hops and is_trusted(address, trusted):
        address = hops.pop()
    return address[:64]


def named(client):
    """An address for the log; a proxy may have passed on a stranger's text."""
    return client if re.fullmatch(r"[\w.:%]*", client, re.ASCII) else repr(client)


def without_port(hop):
    """'[::1]:80' -> '::1', '1.2.3.4:80' -> '1.2.3.4': some proxies write the port."""
    found = re.fullmatch(r"\[(.*)\](?::[0-9]+)?|([^:]*):[0-9]+", hop)
    return (found[1] or found[2]) if found else hop


def is_trusted(address, trusted):
    """Whether this is a proxy of ours; who comes by a unix socket has no address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address in ("", "localhost")
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return any(ip in network for network in trusted)


# Delivery


class Result(typing.NamedTuple):
    """How a try to deliver ended; `outcome` is what is counted, `reason` why it failed.

    `delay` is what the target asked for, in seconds. `down` says that it was for the
    target's sake: AWAY, then nobody has seen the message; UNABLE, where a gateway or a
    broker says so, perhaps because of this message; LIMITED by a rate of the target's.
    `blamed` is the id of the one message of a conversation that cannot be sent.
    """

    outcome: str
    reason: str = None
    delay: float = None
    down: str = None
    blamed: int = None


AWAY, UNABLE, LIMITED = "away", "unable", "limited"


class Parcel:
    """What is delivered at once: a message, or the messages of a `conversation`, which
    is (source, key)."""

    def __init__(self, rows, conversation=None):
        self.rows, self.conversation = rows, conversation
        self.ids = [row["id"] for row in rows]
        self.id, self.attempts = rows[0]["id"], rows[0]["attempts"]
        self.size = sum(len(row["body"]) for row in rows)

    def body(self):
        if self.conversation:
            return conversation_json(*self.conversation, self.rows, self.item)
        return self.rows[0]["body"]

    @staticmethod
    def item(row):
        try:
            return item_json(row)
        except (ValueError, TypeError) as error:  # damaged; the others are not
            raise Unshown(row["id"], unshown(error)) from None

    def key(self, file_id):
        """The same in every delivery of the same messages (Idempotency-Key)."""
        keys = [idempotency_key(row, file_id) for row in self.rows]
        return sha256_of("\n".join(keys)) if self.conversation else keys[0]


class Breaker:
    """How a target is, and what a failure costs:

    state     comes with                         may start       a failure costs the message
    fluindo   a success                          all             an attempt, and its backoff
    limitado  429                                none until the  nothing
                                                 time asked for
    parado    no connection, an n8n that starts  none until the  -
              or has no such workflow; 502 to    next try: 1 to
              504, 520 to 527, 530; IN_A_ROW     10 s
              different messages without success
    sondando  that time                          one message     nothing where it was not
                                                                 seen, then it is the next
                                                                 again; else an attempt, and
                                                                 the one behind it is next
    pausado   a person                           none            as above

    A success ends all but the pause. Where a gateway answers, the first message has PROBES
    tries for one attempt, or a restart would shuffle the queue. What was under way when
    trouble began is no try.
    """

    FIRST, LAST, PROBES = 1, 10, 5  # seconds between two tries, tries of one message
    IN_A_ROW = 5
    TOLD = 2  # failures in a row; some gateways have moments

    def __init__(self, name, clock):
        self.name, self.clock = name, clock
        self.told = Repeats(logging.WARNING, clock)
        self.since = None  # when the trouble began; None while there is none
        self.until = -math.inf  # nothing starts before
        self.after = 0  # the id behind which the next try goes on
        self.paused = False
        self.changed = True  # since it was written down
        self._tries = self._probes = 0
        self._reason = None  # the last that was told
        self._row = set()  # ids of messages that have failed since a success

    def passed(self):
        if self._tries >= self.TOLD:
            spent = self.clock() - self.since
            self.told("back", "%s is back after %.0f seconds", self.name, spent)
        self.changed = self.changed or self.since is not None
        self.since = self._reason = None
        self._tries = self._probes = self.after = 0
        self._row.clear()

    def open(self, reason, delay=None):
        """Begins trouble, or waits longer until the next try; `delay` is the least."""
        now = self.clock()
        if self.since is None:
            self.since, self.changed = now, True
        wait = min(self.LAST, self.FIRST << min(self._tries, 10))
        self.until = now + max(wait, delay or 0)
        self._tries += 1
        if self._tries >= self.TOLD and reason != self._reason:
            line = "%s is in trouble, one message is tried: %s"
            self.told("down", line, self.name, reason)
            self._reason = reason

    def failed(self, id_, attempts, result, shown):
        """(delay, whether the attempt is spared) of a message that was not delivered."""
        now = self.clock()
        if result.down == LIMITED:
            self.until = max(self.until, now + max(1, result.delay or 0))
            return 0, True
        self._row.add(id_)
        if self.since is None and not result.down and len(self._row) < self.IN_A_ROW:
            return result.delay, False
        if now < self.until:
            return (0, True) if result.down else (result.delay, False)
        begins = self.since is None
        self.open(shown, result.delay)
        if result.down == AWAY:
            self.after = self._probes = 0
            return 0, True
        self._probes += 1
        if result.down and self._probes <= self.PROBES and attempts <= 2:
            return 0, not begins
        if not self.after:  # the others shall not wait long for one that is to blame
            self._tries, self.until, self._probes = 1, now + self.FIRST, self.PROBES
        self.after = id_
        return result.delay, False

    def state(self, flying):
        if self.paused:
            return "pausado"
        if self.since is not None:
            return "sondando" if flying else "parado"
        return "limitado" if self.clock() < self.until else "fluindo"


class Target:
    """A place to deliver to. Delivery asks it for room, and starts parcels in it.

    A subclass has start(parcels), and calls finish() for each from its own threads.
    """

    BYTES = 16 << 20  # of messages on their way at the same time
    BITE = 100  # messages of one claim, for which senders wait
    lease = 30  # seconds; it is extended while a message is on its way
    RECENT, PART = 300, 10  # seconds of which attempts are told, in parts
    KEPT = 60  # seconds between two facts that are written down while nothing changes
    at_once = 1  # messages on their way at the same time

    def __init__(self, name, url, source, settings, delivery):
        self.name, self.url, self.source = name, url, source
        self.clock, self.results = delivery.clock, delivery.results
        self.wake, self.store = delivery.wake, delivery.store
        self.timeout, self.rate = settings.forward_timeout, settings.forward_rate
        self.without = ()  # sources that have a target of their own
        self.group = settings.forward_group
        self.where = f"{name} ({url.netloc.rpartition('@')[2]})"
        self.breaker = Breaker(self.where, self.clock)
        self.series = settings.forward_serie
        self.flying, self.weight = {}, 0  # parcel: when to extend its lease; bytes
        self.outcomes = collections.Counter()
        self.recent = collections.deque()  # [part of time, attempts, failures]
        self.allowed = 1e9  # at once, after a 429; it grows with each success
        self.wall = delivery.store.clock
        self.state_since = {}  # {state: since when, seconds since the epoch}, one of them
        self.success = self.error = self.error_at = None  # the last, and its text
        self.written = -math.inf
        self.claimed, self.last = [], -math.inf  # of the last claim, and when it was
        self.hungry, self.more = True, False  # it may find something; at once even
        self._next = -math.inf  # when the next may start

    def room(self, now):
        """(how many messages, how many bytes) may be started now."""
        if now < self.opens():
            return 0, 0
        limit = min(self.at_once, int(self.allowed)) - len(self.flying)
        if self.rate:  # some at once where the clock of the loop is too coarse
            limit = min(limit, max(1, self.rate // 100))
        if self.breaker.since is not None:
            limit = 0 if self.flying else 1
        size = self.BYTES - self.weight
        return limit if size > 0 else 0, size

    def opens(self):
        """Until when it waits, by the clock."""
        if self.breaker.paused:
            return math.inf
        return max(self._next, self.breaker.until)

    def next_claim(self, now):
        """When to claim again though nothing has happened by then."""
        if not self.hungry:
            return math.inf
        if now < self.opens():
            return self.opens()
        return now if self.more else math.inf

    def begin(self, parcels):
        now = self.clock()
        if self.rate and parcels:
            self._next = max(self._next, now) + len(parcels) / self.rate
        for parcel in parcels:
            self.flying[parcel] = now + self.lease / 2
            self.weight += parcel.size
        self.start(parcels)

    def finish(self, parcel, result):
        """A parcel is back; the one method that other threads call."""
        self.results.append((self, parcel, result))
        self.wake()

    def land(self, parcel, result):
        """(delay, whether the attempt is spared) of what was not delivered."""
        del self.flying[parcel]
        self.weight -= parcel.size
        self.outcomes[result.outcome] += 1
        self.note(result)
        if result.reason is None:
            self.breaker.passed()
            self.allowed += 0.02
            return None, False
        if result.down == LIMITED:
            self.allowed = 1
        shown = result.reason if result.outcome in ("conexao", "iniciando") else None
        # what it answers is not for the log: it may quote the message, or what we sent
        shown = shown or what_of(result)
        return self.breaker.failed(parcel.id, parcel.attempts, result, shown)

    def note(self, result):
        part, failed = int(self.clock() // self.PART), result.reason is not None
        if not self.recent or self.recent[-1][0] != part:
            self.recent.append([part, 0, 0])
        if len(self.recent) > self.RECENT // self.PART + 1:
            self.recent.popleft()
        self.recent[-1][1] += 1
        self.recent[-1][2] += failed
        if failed:
            self.error, self.error_at = result.reason[:200], int(self.wall())
        else:
            self.success = int(self.wall())

    def overdue(self, now):
        """Ids of messages whose leases should be extended, every second."""
        parcels = [parcel for parcel, when in self.flying.items() if when <= now]
        self.flying.update((parcel, now + self.lease / 2) for parcel in parcels)
        return [id_ for parcel in parcels for id_ in parcel.ids]

    def check(self, now):
        """Called every second."""

    def stop(self):
        """Nothing more will be started or is awaited."""

    def pause(self, paused):
        self.breaker.paused, self.breaker.changed, self.hungry = paused, True, True

    def try_now(self):
        self.breaker.until, self.hungry = -math.inf, True

    def state(self):
        return self.breaker.state(self.flying)

    def since(self):
        """Since when it is so, in seconds since the epoch; both states in which it is in
        trouble are one."""
        state = self.state()
        kind = "parado" if state == "sondando" else state
        if kind not in self.state_since:
            self.state_since = {kind: int(self.wall())}
        return self.state_since[kind]

    def facts(self):
        """What outlives a restart."""
        since, state = self.since(), next(iter(self.state_since))
        return {"paused": self.breaker.paused, "state": state, "since": since} | {
            name: getattr(self, name) for name in ("success", "error", "error_at")
        }

    def recall(self, facts):
        """Goes on as it was when facts() were written down."""
        self.breaker.paused = bool(facts.get("paused"))
        for name in ("success", "error", "error_at"):
            setattr(self, name, facts.get(name))
        since = facts.get("since") or int(self.wall())
        self.state_since = {facts.get("state"): since}
        if facts.get("state") == "parado":
            self.breaker.since = self.clock() - (self.wall() - since)

    def report(self, waiting):
        """What the page and the metrics show; `waiting` is (how many messages, seconds
        since the first of them came)."""
        now, clock = self.wall(), self.clock()
        since, first = self.since(), int(clock - self.RECENT) // self.PART
        recent = [part for part in self.recent if part[0] > first]
        until = max(self.breaker.until, self._next)
        return {
            "destino": self.name,
            "endereco": self.url.netloc.rpartition("@")[2],
            "estado": self.state(),
            "problema": self.breaker.since is not None,
            "desde": max(0, round(now - since)),
            "em_voo": len(self.flying),
            "tentativas": dict(self.outcomes),
            "ultimo_sucesso": self.success and max(0, round(now - self.success)),
            "ultimo_erro": self.error,
            "ultimo_erro_ha": self.error_at and max(0, round(now - self.error_at)),
            "tentativas_5min": sum(part[1] for part in recent),
            "falhas_5min": sum(part[2] for part in recent),
            "esperando": waiting[0],
            "mais_antiga": waiting[1],
            "proxima": math.ceil(until - clock) if until > clock else None,
        }


def what_of(result):
    """An outcome for the log: the status of an answer, without its text."""
    return result.reason[:3] if result.outcome.endswith("xx") else result.outcome


def idempotency_key(row, file_id):
    """The same in every delivery of the same event, and no other's: neither another
    source's nor, where there is no event id, that of a row of another file."""
    if not row["event_id"]:
        return f"{file_id}-{row['id']}"
    event = urllib.parse.quote(row["event_id"], VISIBLE.replace("%", ""))
    return f"{source_label(row)}:{event}"


def source_label(row):
    """A row's source, as a header can hold it; "" for none."""
    return urllib.parse.quote(row["source"] or "", "")


def sha256_of(text):
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def sender_headers(row):
    """Those that a target gets: what we say of a message is not the sender's to say."""
    headers = json.loads(row["headers"] or "{}")
    return {k: v for k, v in headers.items() if not k.startswith("x-buffer-")}


# A segment of dots, as targets may read it: after its escapes, with a backslash for a
# slash, a parameter or a blank behind it, in UTF-8 that is longer than need be.
SLASH = rb"[/\\]|\xc0\xaf|\xc1\x9c"
DOTS = re.compile(rb"(^|%b)(\.|\xc0\xae)+([;\0- ][^/\\]*)?($|%b)" % (SLASH, SLASH))


def climbs(segment):
    """Whether a segment of a path is .., or holds it for who decodes it first."""
    return bool(DOTS.search(urllib.parse.unquote_to_bytes(segment)))


def names_in(query):
    """Its names, those that a target may take for the same as one: PHP cuts them at [
    and has _ for dots and blanks, others know no capitals or split at ; too."""
    names = (query_name(pair).strip() for pair in re.split("[&;]", query))
    return {re.sub("[ .]", "_", re.split(r"[\[\0]", name)[0]).lower() for name in names}


class Push(Target):
    """Delivers by POST to a URL, with FORWARD_CONCURRENCY threads."""

    def __init__(self, name, url, source, settings, delivery):
        super().__init__(name, url, source, settings, delivery)
        self.at_once = settings.forward_concurrency
        self.fixed = {name.lower(): value for name, value in settings.forward_header}
        self.file_id = delivery.store.file_id
        if url.username is not None:
            pair = urllib.parse.unquote(url.netloc.rpartition("@")[0]).encode()
            pair += b"" if b":" in pair else b":"  # RFC 7617
            basic = base64.b64encode(pair).decode()
            self.fixed.setdefault("authorization", f"Basic {basic}")
        self.parcels = queue.SimpleQueue()
        self.couriers = [Courier(self) for _ in range(self.at_once)]
        for courier in self.couriers:
            courier.start()

    def start(self, parcels):
        for parcel in parcels:
            self.parcels.put(parcel)

    def check(self, now):
        for courier in self.couriers:
            courier.check(now)

    def stop(self):
        for _ in self.couriers:
            self.parcels.put(None)

    def address(self, parcel):
        """Path and query: the URL's, then a message's own as they came.

        Segments such as .. are left out, and names that the URL's query has: senders
        must not reach other paths, nor say what FORWARD_URL says.
        """
        row = {"path": None, "query": None} if parcel.conversation else parcel.rows[0]
        rest = [part for part in (row["path"] or "").split("/") if not climbs(part)]
        rest, path = "/".join(rest).lstrip("/"), self.url.path or "/"
        if rest:
            path = f"{path.rstrip('/')}/{rest}"
        query = row["query"] or ""
        if self.url.query:
            ours = names_in(self.url.query)
            pairs = query.split("&") if query else ()
            pairs = (pair for pair in pairs if not ours & names_in(pair))
            query = "&".join((self.url.query, *pairs))
        return f"{path}?{query}" if query else path

    def headers(self, parcel, body):
        if parcel.conversation:
            headers = {"content-type": "application/json"}
        else:
            headers = sender_headers(parcel.rows[0])
        headers.pop("accept-encoding", None)  # which the sender could read, and not we
        headers["host"] = self.url.netloc.rpartition("@")[2]
        headers["content-length"] = str(len(body))
        headers["x-buffer-id"] = str(parcel.id)
        headers["x-buffer-de"] = self.file_id
        headers["x-buffer-tentativa"] = str(parcel.attempts)
        headers["x-buffer-fonte"] = source_label(parcel.rows[0])
        headers["idempotency-key"] = parcel.key(self.file_id)
        return {**headers, **self.fixed}


def http_line(url, timeout):
    """A connection to a split URL, not made yet; over https it verifies certificates."""
    secure = url.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    return kind(url.hostname, url.port, timeout=timeout)


class Lines(io.BufferedReader):
    """http.client takes headers that break off for whole ones; here they raise."""

    place = "start"

    def readline(self, size=-1):
        line = super().readline(size)
        if not line and self.place == "headers":
            raise http.client.IncompleteRead(b"")
        if self.place == "start":
            self.place = "headers"
        return line


class Unanswered(ConnectionError):
    """The connection broke before anything of an answer came."""


class Response(http.client.HTTPResponse):
    def __init__(self, *values, **options):
        super().__init__(*values, **options)
        self.fp = Lines(self.fp.detach())

    def _read_status(self):
        """Unanswered where nothing has come. http.client knows of interim answers (RFC 9110 15.2) only 100, and would take
        another one for the end: then what follows it answers the next message."""
        try:
            version, status, reason = super()._read_status()
        except ConnectionError as error:
            raise Unanswered(*error.args) from error
        interim = 100 < status < 200
        return version, http.client.CONTINUE if interim else status, reason

    def begin(self):
        lines = self.fp
        super().begin()
        lines.place = "body"  # some forget the line after the last chunk


class Courier(threading.Thread):
    """A thread with a keep-alive connection, which delivers one message at a time."""

    CONNECT = 10  # seconds
    READ = 65536  # bytes of an answer; after more the connection is not used again

    def __init__(self, target):
        super().__init__(name=f"courier of {target.name}", daemon=True)
        self.target = target
        self.line = self.socket = None  # the connection; it leaves its socket to the
        self.until = math.inf  # last answer. The deadline of the delivery in hand
        self.lock = threading.Lock()  # over socket, until and late
        self.late = False

    def run(self):
        for parcel in iter(self.target.parcels.get, None):
            try:
                result = self.deliver(parcel)
            except Unshown as error:
                blamed, reason = error.args
                result = Result("erro", reason, blamed=blamed)
            except Exception as error:  # a message that cannot be sent, or our fault
                log.exception("delivery of message %d failed", parcel.id)
                self.hang_up()
                result = Result("erro", f"não pôde ser enviada: {safe_text(error)}")
            self.target.finish(parcel, result)
            del parcel  # or each of the threads keeps its last one while it waits

    def deliver(self, parcel):
        with self.lock:
            self.until, self.late = self.target.clock() + self.target.timeout, False
        try:
            reused = self.is_alive_still()
            if not reused:
                failure = self.connect()
                if failure:
                    return failure
            with self.post(parcel) as answer:
                text = self.read(answer)
            if self.late:  # one without a length seems to end where it is cut
                raise TimeoutError
            own_path = not parcel.conversation and parcel.rows[0]["path"]
            return result_of(answer, text, bool(own_path))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.hang_up()
            if self.late or isinstance(error, TimeoutError):
                reason = f"sem resposta em {self.target.timeout} s"
                return Result("timeout", reason)
            # the target may have closed it as we wrote: again at once, but it counts,
            # since it may also have acted on it (RFC 9110 9.2.2)
            again = 0 if reused and isinstance(error, Unanswered) else None
            # ours hold what was to be sent, with what is secret in FORWARD_URL
            ours = isinstance(error, (ValueError, http.client.InvalidURL))
            shown = safe_text(error) if ours else repr(error)[:500]
            return Result("interrompida", f"resposta interrompida: {shown}", again)
        finally:
            with self.lock:
                self.until = math.inf

    def check(self, now):
        """Cuts a delivery that takes too long; timeouts of sockets are for each read."""
        with self.lock:
            if now >= self.until and self.socket:
                self.until, self.late = math.inf, True
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def is_alive_still(self):
        """Whether there is a connection on which nothing has come, its end least."""
        if not self.line or not self.line.sock:
            return False
        watch = select.poll()
        watch.register(self.line.sock, select.POLLIN)
        if watch.poll(0):
            self.hang_up()
        return bool(self.line)

    def connect(self):
        """A new connection; a Result when there is none to be had."""
        self.hang_up()
        url, timeout = self.target.url, self.target.timeout
        line = http_line(url, min(self.CONNECT, timeout))
        try:
            line.connect()
        except (OSError, UnicodeError) as error:
            line.close()
            return Result("conexao", f"sem conexão: {error}", down=AWAY)
        line.sock.settimeout(timeout)
        line.response_class = Response
        with self.lock:
            self.line, self.socket = line, line.sock
        return None

    def hang_up(self):
        with self.lock:
            line, self.line, self.socket = self.line, None, None
        if line:
            line.close()

    def post(self, parcel):
        line, body = self.line, parcel.body()
        line.putrequest("POST", self.target.address(parcel), True, True)
        for name, value in self.target.headers(parcel, body).items():
            line.putheader(name, value)
        try:
            line.endheaders(body)
        except (
            ConnectionError
        ) as error:  # it may have said why: 413, not 408 for idleness
            answer = line.getresponse()
            if answer.status < 400 or answer.status == 408:
                raise Unanswered(*error.args) from error
            answer.will_close = True
            return answer
        return line.getresponse()

    def read(self, answer):
        """The start of an answer's body, all of which has to arrive."""
        text = answer.read(self.READ)
        more = answer.read(1) if len(text) == self.READ else b""
        if more:
            self.hang_up()
        elif answer.length:
            raise http.client.IncompleteRead(text, answer.length)
        if answer.will_close:
            self.hang_up()
        return text


STARTING = b"n8n is starting up. Please wait"  # with 200: it migrates its database
NO_WORKFLOW = b"is not registered", b"Cannot POST"  # n8n's 404, and while it starts


def result_of(answer, text, has_own_path):
    """What an HTTP answer means for the message, and for the target."""
    status, group = answer.status, f"{answer.status // 100}xx"
    if status == 200 and text.strip() == STARTING:
        return Result("iniciando", "200, mas o n8n ainda está iniciando", down=AWAY)
    if group == "2xx":
        return Result(group)
    reason = f"{status} {answer.reason}".strip()
    if group == "3xx":
        where = answer.headers.get("Location", "")[:200]
        reason += f" para {where}: redirecionamentos não são seguidos"
    if text:
        reason += ": " + text[:500].decode("utf-8", "replace").strip()
    down = DOWN.get(status)
    if status == 404 and not has_own_path and any(part in text for part in NO_WORKFLOW):
        down = AWAY
    return Result(group, reason, retry_after(answer.headers.get("Retry-After")), down)


# 520 to 530 are Cloudflare's; 429 is the target's limit, not the message's fault.
DOWN = dict.fromkeys((502, 503, 504, *range(520, 528), 530), UNABLE) | {429: LIMITED}


def retry_after(text, now=time.time):
    """Seconds that Retry-After asks for (RFC 9110 10.2.3), at most an hour; or None."""
    text = (text or "").strip()
    if re.fullmatch("[0-9]{1,18}", text):
        return min(3600, int(text))
    try:
        when = email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(3600, max(0, math.ceil(when - now())))


class Relay(Target):
    """Hands messages over to RabbitMQ: persistent, mandatory, with publisher confirms.

    A message is done when the broker has confirmed it; many are on their way at the
    same time. pika's connection belongs to a thread. `lock` is over `up` and `parcels`:
    what is put in while it is up is published, or comes back when the connection ends.
    """

    at_once, lease = 1000, 60
    # With these AMQP closes for a cause that is the same for all messages: we have, an
    # operator has, no vhost, no right, no exchange, not allowed.
    FOR_ALL = 200, 320, 402, 403, 404, 530

    def __init__(self, name, url, source, settings, delivery):
        super().__init__(name, url, source, settings, delivery)
        if self.group:
            raise StartError(f"{name} is amqp, which takes no FORWARD_GROUP", 2)
        self.pika, self.file_id = import_pika(name), delivery.store.file_id
        self.exchange, self.routing_key, self.parameters = self.parse(name, url)
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.connection = self.channel = None
        self.up = self.blocked = False
        self.left = None  # as of the last look, see unsent()
        self.alone = False  # one message at a time, to find the one that is refused
        self.why = self.cause = None  # why the connection ended; why this side ended it
        self.heard = self.clock()  # when the broker has shown last that it confirms
        self.parcels = collections.deque()  # to publish
        self.unconfirmed, self.returned = {}, {}  # delivery tag: parcel; id: why
        self.tag = 0
        threading.Thread(target=self.run, name=f"relay of {name}", daemon=True).start()

    def parse(self, name, url):
        """(exchange, routing key, pika's parameters); our words are taken out for it."""
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        exchange = query.pop("exchange", "")
        key = query.pop("routing_key", "{fonte}.{caminho}" if exchange else "")
        if not key or re.search("[{}]", re.sub(r"\{(fonte|caminho)\}", "", key)):
            raise StartError(
                f"{name}: routing_key takes text, {{fonte}}, {{caminho}}", 2
            )
        url = url._replace(query=urllib.parse.urlencode(query))
        try:
            return exchange, key, self.pika.URLParameters(url.geturl())
        except (ValueError, TypeError) as error:
            raise StartError(f"{name}: {error}", 2) from None

    # Called by Delivery

    def room(self, now):
        if not self.up or self.blocked or (self.alone and self.flying):
            return 0, 0
        limit, size = super().room(now)
        return min(limit, 1) if self.alone else limit, size

    def start(self, parcels):
        with self.lock:
            up = self.up
            if up:
                self.parcels.extend(parcels)
                self.connection.ioloop.add_callback_threadsafe(self.publish)
        if not up:
            self.come_back(parcels)

    def check(self, now):
        """A queue that has lost its leader may never confirm; a new channel may help."""
        waits = self.up and not self.blocked and self.flying
        left = self.unsent()
        if left != self.left:  # a slow upload is no silence
            self.left, self.heard = left, now
        if waits and now - self.heard >= self.timeout:
            self.heard = now
            with self.lock, contextlib.suppress(Exception):  # it may be closing already
                self.connection.ioloop.add_callback_threadsafe(self.give_up)

    def unsent(self):
        """Bytes that wait to leave for the broker."""
        with contextlib.suppress(Exception):  # the connection may be ending
            return self.connection._get_write_buffer_size()

    def state(self):
        connected = self.up and self.breaker.since is not None
        state = self.breaker.state(self.flying or connected)
        return "bloqueado" if self.blocked and state != "pausado" else state

    def stop(self):
        self.stopped.set()
        with self.lock, contextlib.suppress(Exception):  # it may be closing by itself
            self.connection.ioloop.add_callback_threadsafe(self.connection.close)

    # Called by pika, or from run()

    def run(self):
        while not self.stopped.is_set():
            self.why = self.cause = None
            try:
                self.connection = self.pika.SelectConnection(
                    self.parameters, self.opened, self.ended, self.ended
                )
                self.connection.ioloop.start()
            except Exception as error:  # a thread that ends would stop the relay
                log.exception("the relay will connect again")
                self.why = error
            self.after_connection()
            self.stopped.wait(max(0, self.breaker.until - self.clock()))

    def opened(self, connection):
        connection.add_on_connection_blocked_callback(self.block)
        connection.add_on_connection_unblocked_callback(self.unblock)
        connection.channel(on_open_callback=self.channel_opened)

    def channel_opened(self, channel):
        self.channel, self.tag = channel, 0
        channel.add_on_close_callback(self.channel_closed)
        channel.add_on_return_callback(self.came_back)
        channel.confirm_delivery(self.confirmed, callback=self.ready)

    def ready(self, _):
        with self.lock:
            self.up = self.hungry = True
        self.wake()

    def block(self, *_):
        """The broker's memory or disk alarm: what is on its way waits."""
        self.blocked = True
        log.warning("%s takes no more for now", self.breaker.name)

    def unblock(self, *_):
        self.heard, self.blocked, self.hungry = self.clock(), False, True
        self.wake()

    def give_up(self):
        if self.connection.is_open:
            self.cause = TimeoutError(0, f"no confirm in {self.timeout} s")
            log.warning("%s is left: no confirm in %d s", self.where, self.timeout)
            self.connection.close()
            # a dead connection never says that it is closed
            self.connection.ioloop.call_later(5, self.connection.ioloop.stop)

    def publish(self):
        if not self.unconfirmed:
            self.heard = self.clock()
        while self.parcels and self.channel.is_open:
            parcel = self.parcels.popleft()
            [row] = parcel.rows
            try:
                key = routing_key(self.routing_key, row)
                what = self.pika.BasicProperties(
                    **message_properties(row, self.file_id)
                )
                self.channel.basic_publish(
                    self.exchange, key, row["body"], what, mandatory=True
                )
            except Exception as error:  # it cannot be put into AMQP, and is not sent
                log.exception("relay of message %d failed", parcel.id)
                reason = f"não pôde ser enviada: {safe_text(error)}"
                self.finish(parcel, Result("erro", reason))
            else:
                self.tag += 1
                self.unconfirmed[self.tag] = parcel

    def came_back(self, channel, method, properties, body):
        """Nothing takes it (it is confirmed besides, after this)."""
        why = f"não roteada: {method.reply_code} {method.reply_text}"
        self.returned[properties.headers["x-buffer-id"]] = why

    def confirmed(self, frame):
        self.heard = self.clock()
        method, tags = frame.method, [frame.method.delivery_tag]
        if method.multiple:
            tags = [tag for tag in self.unconfirmed if tag <= method.delivery_tag]
        for tag in tags:
            parcel = self.unconfirmed.pop(tag)
            why = self.returned.pop(parcel.id, None)
            if isinstance(method, self.pika.spec.Basic.Nack):
                result = Result("nack", "recusada pelo broker (nack)", down=UNABLE)
            elif why:  # without an exchange of its own its queue is not there
                down = None if self.exchange else UNABLE
                result = Result("devolvida", why, down=down)
            else:
                result = Result("confirmada")
            self.alone = False
            self.finish(parcel, result)

    def channel_closed(self, channel, error):
        if isinstance(error, self.pika.exceptions.ChannelClosedByBroker):
            self.cause = error
            if self.connection.is_open:
                self.connection.close()

    def ended(self, connection, error):
        self.why = error
        connection.ioloop.stop()

    def after_connection(self):
        with self.lock:
            self.up = self.blocked = False
            with contextlib.suppress(Exception):  # its descriptors, before the garbage
                self.connection.ioloop.close()
            published, waiting = list(self.unconfirmed.values()), list(self.parcels)
            self.unconfirmed.clear()
            self.returned.clear()
            self.parcels.clear()
        error = self.cause or self.why
        if not self.stopped.is_set():
            self.breaker.open(self.said(error))
        code = getattr(error, "reply_code", 200)
        by_message = bool(published) and code not in self.FOR_ALL
        if by_message and len(published) == 1:
            self.finish(published.pop(), Result("recusada", f"recusada: {error!r}"))
        self.alone = self.alone or by_message
        self.come_back(published + waiting, self.said(error))

    def said(self, error):
        """Not of any exception: some of pika's hold what it could not send."""
        known = (
            self.pika.exceptions.AMQPConnectionError,
            self.pika.exceptions.ChannelClosed,
        )
        return repr(error) if isinstance(error, known) else safe_text(error)

    def come_back(self, parcels, why="sem conexão"):
        for parcel in parcels:
            self.finish(parcel, Result("conexao", why, down=AWAY))


def import_pika(name):
    try:
        import pika
        import pika.exceptions
    except ImportError:
        hint = f"{sys.executable} -m pip install pika, or apt install python3-pika"
        raise StartError(f"{name} needs pika for amqp. Try: {hint}") from None
    return pika


def routing_key(template, row):
    """Words between dots, for topic exchanges; at most 255 bytes, as AMQP has it."""
    key = template.replace("{fonte}", row["source"] or "webhook")
    path = path_text(row["path"]) or ""
    key = key.replace("{caminho}", path.replace("/", "."))
    return short(key.strip("."))


def short(text):
    return text.encode()[:255].decode(errors="ignore")


def message_properties(row, file_id):
    """Of a message in AMQP; its headers are the sender's, in lower case."""
    headers = sender_headers(row)
    message_id = idempotency_key(row, file_id)
    if len(message_id) > 255:  # the most AMQP has room for
        message_id = sha256_of(message_id)
    kind = headers.pop("content-type", None)
    when = datetime.datetime.fromisoformat(row["created_at"] + "+00:00")
    headers = {name: value for name, value in headers.items() if len(name) <= 255}
    return {
        "message_id": message_id,
        "timestamp": int(when.timestamp()),
        "type": short(path_text(row["path"]) or ""),
        "content_type": kind and short(kind),
        "app_id": short(socket.gethostname()),
        "delivery_mode": 2,
        "headers": {
            **headers,
            "x-buffer-id": row["id"],
            "x-buffer-fonte": row["source"] or "",
            "x-buffer-tentativa": row["attempts"],
            "x-buffer-query": row["query"] or "",
        },
    }


SCHEMES = {"http": Push, "https": Push, "amqp": Relay, "amqps": Relay}


class Delivery:
    """Delivers messages by itself, to FORWARD_URL and FORWARD_<FONTE>.

    All that concerns the store happens on the server's thread, in the transaction of
    its rounds: what came back is settled and what comes next is claimed with the same
    sync that webhooks wait for. The threads of a target only talk to the target. They
    put their results into `results` and wake the loop.
    """

    PAUSE = 0.02  # seconds between two claims while senders crowd

    def __init__(self, settings, store, clock=time.monotonic):
        self.store, self.clock = store, clock
        self.results = collections.deque()
        self.loop_wake = lambda: None  # the server sets it
        self.until = math.inf  # when there may be something to do though nothing came
        self.closing = False
        self._news = False  # the loop has been woken
        self._done, self._failed = [], []  # ids, verdicts; until they are committed
        self.refused = Repeats(logging.WARNING, clock)
        self._changes = -1
        places = [
            (f"FORWARD_{name}", source.forward, name.lower().replace("_", "-"))
            for name, source in settings.sources
        ]
        places.append(("FORWARD_URL", settings.forward_url, None))
        keys = [settings.group_key, *(own.group_key for _, own in settings.sources)]
        for name in ("forward_group", "forward_serie"):
            if getattr(settings, name) and not any(keys):
                raise StartError(f"{name.upper()} is set, but not GROUP_KEY", 2)
        if settings.forward_group and settings.forward_serie:
            raise StartError("FORWARD_GROUP or FORWARD_SERIE, not both", 2)
        self.targets = []
        for name, address, source in places:
            if address:
                url = urllib.parse.urlsplit(address)
                target = SCHEMES[url.scheme](name, url, source, settings, self)
                self.targets.append(target)
        if places[-1][1]:
            without = [target.source for target in self.targets[:-1]]
            self.targets[-1].without = without
        store.leave_out(any(target.without for target in self.targets))
        known = store.targets()
        for target in self.targets:
            target.recall(known.get(target.name, {}))
            while store.lost(target.name):  # nobody else can have had it
                pass

    def wake(self):
        """Called by any thread after it has put something into `results`."""
        if not self._news:
            self._news = True
            self.loop_wake()

    def due(self, look):
        left = self._failed or self._done  # of a round that could not be committed
        return look or self._news or left or self.clock() >= self.until

    def busy(self):
        return any(target.flying for target in self.targets) or self._done

    def turn(self, look=False, crowded=False):
        """Inside a transaction: settles what has come back, claims what can start.

        In a crowded round senders come first: a message now and then is enough.
        """
        self._news = False
        now = self.clock()
        if look or self.store.changes() != self._changes:
            for target in self.targets:  # no new message makes a conversation quiet
                target.hungry = target.hungry or look or not target.group
        self.settle()
        for target in self.targets:
            if look:
                self.refused.flush()
                target.breaker.told.flush()
                target.check(now)
                self.store.estender(target.overdue(now), lease=target.lease)
                self.keep(target, now)
            self.claim(target, now, crowded)
        self._changes = self.store.changes()
        self.until = min(target.next_claim(now) for target in self.targets)

    def keep(self, target, now):
        """Writes down what should outlive a restart: what changes at once, the rest once
        a minute."""
        late = target.recent and now - target.written >= target.KEPT
        if target.breaker.changed or late:
            self.store.keep_target(target.name, target.facts())
            target.breaker.changed, target.written = False, now

    def settle(self):
        while self.results:
            target, parcel, result = self.results.popleft()
            delay, spared = target.land(parcel, result)
            if target.group or target.series:  # others of it may have waited
                target.hungry = True
            if result.reason is None:
                self._done += parcel.ids
                continue
            ids = parcel.ids
            if result.blamed:  # it alone; the others go on without it
                args = self.store.erro, [result.blamed]
                self._failed.append(functools.partial(*args, reason=result.reason))
                ids = [id_ for id_ in ids if id_ != result.blamed]
                delay, spared = 0, True
            verdict = functools.partial(
                self.store.devolver,
                ids,
                attempt=None if parcel.conversation else parcel.attempts,
                reason=result.reason,
                delay=delay,
                spared=spared,
            )
            self._failed.append(verdict)
            target.hungry = True
            if not result.down:
                self.tell(target, parcel, result)
        for verdict in self._failed:
            verdict()
        if self._done:
            self.store.processado(self._done)

    def tell(self, target, parcel, result):
        """Says once in a while that messages fail, but not what the target answers."""
        what = what_of(result)
        if what == "timeout":
            what += ", it may still be at work on it: raise FORWARD_TIMEOUT"
        line = "%s did not take message %d, its attempt %d: %s"
        kind = f"{target.name} {what}"
        self.refused(kind, line, target.where, parcel.id, parcel.attempts, what)

    def claim(self, target, now, crowded):
        room, size = (0, 0) if self.closing else target.room(now)
        target.more = target.hungry and room > 0
        if not target.more or (crowded and now < target.last + self.PAUSE):
            return
        limit, target.last = 1 if crowded else min(room, target.BITE), now
        values = limit, target.lease, size
        where = {"source": target.source, "without": target.without}
        where["consumer"] = target.name
        if target.series:
            found = self.store.pegar_conversas(*values, single=True, **where)
            target.claimed = [Parcel(rows) for *_, rows in found]
        elif target.group:
            where |= {"quiet": target.group, "longest": 6 * target.group}
            found = self.store.pegar_conversas(*values, **where)
            target.claimed = [Parcel(rows, tuple(who)) for *who, rows in found]
        else:
            found = self.next(target, values, where)
            target.claimed = [Parcel([row]) for row in found]
        target.hungry = bool(found)
        target.more = len(found) == limit < room

    def next(self, target, values, where):
        """The oldest; while it is tried what has not failed yet, then what is behind the
        last try, so that those to blame stand in nobody's way."""
        after, pegar = (
            target.breaker.after,
            functools.partial(self.store.pegar, *values),
        )
        if not after:
            return pegar(**where)
        return (
            pegar(fresh=True, **where) or pegar(after=after, **where) or pegar(**where)
        )

    def committed(self):
        """After the transaction: starts what it has claimed."""
        self._done, self._failed = [], []
        for target in self.targets:
            parcels, target.claimed = target.claimed, []
            target.begin(parcels)

    def rolled_back(self):
        """In place of committed(): what came back is settled again in the next turn."""
        for target in self.targets:
            target.claimed, target.hungry = [], True
            target.breaker.changed = True
        self.until = math.inf  # the next look tries again: a full disk takes a while

    def stop(self):
        self.refused.flush(gap=0)
        flying = [(t, id_) for t in self.targets for p in t.flying for id_ in p.ids]
        if flying:
            line = "%d deliveries without an answer: they come first after the start"
            log.warning(line, len(flying))
        self.loop_wake = lambda: None
        with contextlib.suppress(sqlite3.Error), self.store.transaction():
            ids = [id_ for _, id_ in flying]
            self.store.devolver(ids, delay=0, spared=True)
            for target in self.targets:
                self.store.keep_target(target.name, target.facts())
        for target in self.targets:
            target.stop()

    def report(self):
        return [
            target.report(self.store.waiting(target.source, target.without))
            for target in self.targets
        ]

    def named(self, name):
        """The target with this name, or all; LookupError for an unknown one."""
        found = [target for target in self.targets if name in (None, target.name)]
        if not found:
            raise LookupError(name)
        return found


# Housekeeping


class Housekeeper(threading.Thread):
    """The timer: expired leases, old history, space for the disk.

    It works in bites of a few milliseconds with pauses between them, because senders
    wait for the same lock.
    """

    EVERY = 60  # seconds
    ROWS, PAGES, PAUSE = 100, 200, 0.02  # of a bite, and seconds after it
    GATHERED = 500  # messages, in such a bite

    def __init__(self, settings, store):
        super().__init__(name="housekeeper", daemon=True)
        self.settings, self.store = settings, store
        self.stopped = threading.Event()
        self.trouble = Repeats(logging.ERROR)
        self._done = -math.inf

    def run(self):
        while not self.stopped.wait(self.EVERY):
            try:
                self.tidy()
            except Exception:  # whatever it was, the timer must live on
                log.exception("housekeeping will try again")

    def tidy(self, bites=math.inf):
        """All there is to do, in at most so many bites."""
        try:
            days, dedupe_days = self.settings.retention_days, self.settings.dedupe_days
            purge = functools.partial(self.store.purge, days, self.ROWS)
            forget = functools.partial(self.store.forget, dedupe_days, self.ROWS)
            shrink = functools.partial(self.store.shrink, self.PAGES)
            gather = functools.partial(self.store.gather, self.GATHERED)
            for bite in (self.store.lease_ended, purge, forget, gather, shrink):
                while bites > 0 and bite() and not self.stopped.wait(self.PAUSE):
                    bites -= 1
            self.store.write_refusals()
            self.store.checkpoint()
        except sqlite3.Error as error:
            text = safe_text(error)
            self.trouble(text, "housekeeping will try again: %s", text)

    def nudge(self, now):
        """A little of it when it is due, for hosts where processes come and go."""
        if now - self._done >= self.EVERY:
            self._done = now
            self.tidy(bites=5)

    def stop(self):
        self.stopped.set()
        self.join()


# Alarms


def post(url, body, timeout=10):
    """Sends JSON; OSError or HTTPException unless the answer is 2xx. Redirects are not
    followed: who may read the alarms stands in the URL."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Content-Type": "application/json", "User-Agent": "buffer.py"}
    link = http_line(parts, timeout)
    with contextlib.closing(link):
        link.connect()
        # the timeout is for one byte, and one every nine seconds would hold us for ever
        end = threading.Timer(timeout, link.sock.shutdown, [socket.SHUT_RDWR])
        end.daemon = True
        end.start()
        try:
            target = f"{parts.path or '/'}?{parts.query}".removesuffix("?")
            link.request("POST", target, body, headers)
            status = link.getresponse().status
        finally:
            end.cancel()
    if not 200 <= status < 300:
        raise OSError(status, f"it answers {status}")


class Alarm:
    """One condition: whether it is so, and what was told of it."""

    is_on = told = False
    begun = 0  # how often, since it was told
    when = -math.inf  # it was told


class Alarms(threading.Thread):
    """Tells ALERT_URL when something is wrong and when it is over; Watch says what is.

    It has a thread of its own, for the target may be slow or down. Nothing is queued: as
    soon as it may be told it tells how things are then, and how often they have changed.
    """

    EVERY, GAP = 10, 300  # seconds between looks, and between alarms of one kind
    LONGEST = 600  # seconds until the target is tried again
    OVER = types.MappingProxyType(
        {
            "destino": "the target takes messages again",
            "file": "the file at DB_PATH is the open one again",
            "disk": "the database's disk has room again",
            "queue": "the queue is shorter again",
            "recusas": "no sender was refused for five minutes",
            "erro": "no message has landed in erro for five minutes",
            "age": "no message has waited for longer than ALERT_AGE",
            "silence": "a message has come",
        }
    )

    def __init__(self, settings, watch, clock=time.monotonic, send=post):
        super().__init__(name="alarms", daemon=True)
        self.settings, self.watch = settings, watch
        self.clock, self.send = clock, send
        self.stopped = threading.Event()
        self.trouble = Repeats(logging.WARNING, clock)
        self.alarms = collections.defaultdict(Alarm)
        self._wait, self._retry = self.EVERY, -math.inf

    def run(self):
        while not self.stopped.wait(self.EVERY):
            try:
                self.look()
            except Exception:  # whatever it was, the alarms must live on
                log.exception("alarms will look again")

    def stop(self):
        """Without waiting for a target that is slow."""
        self.stopped.set()
        self.join(0.5)

    def look(self):
        """Tells what has to be told."""
        now = self.clock()
        for one in self.watch.found:
            if one.kind not in self.OVER:
                continue
            alarm = self.alarms[one.kind, one.name]
            alarm.begun += one.alarm and not alarm.is_on
            alarm.is_on = one.alarm
            is_news = alarm.begun or one.alarm != alarm.told
            if is_news and now - alarm.when >= self.GAP and now >= self._retry:
                self.tell(one.kind, alarm, one.text, one.numbers)
            if self.stopped.is_set():
                return
        self.trouble.flush()

    def tell(self, kind, alarm, text, numbers):
        host, state = socket.gethostname(), "begins" if alarm.is_on else "over"
        said = {"kind": kind, "state": state, "host": host, "begun": alarm.begun}
        if not alarm.is_on:
            summed = f"; before, {text}" if numbers.get("reasons") else ""
            text = f"over: {self.OVER[kind]}{summed}"
        text = f"buffer.py on {host}: {text}"
        if alarm.begun > alarm.is_on:
            text += f"; how often it began since the last alarm: {alarm.begun}"
        body = to_json({"text": text, **said, **numbers})
        try:
            self.send(self.settings.alert_url, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._retry = self.clock() + self._wait
            self._wait = min(2 * self._wait, self.LONGEST)
            self.trouble("target", "ALERT_URL is tried again: %s", safe_text(error))
            return
        log.warning("alarm: %s %s", kind, state)
        self._wait, alarm.when = self.EVERY, self.clock()
        alarm.told, alarm.begun = alarm.is_on, 0
        if kind == "erro":
            self.watch.told_dead()


# The server

try:
    from waitress import create_server, wasyncore
    from waitress.server import BaseWSGIServer

    Socket = wasyncore.dispatcher
except ImportError:  # a host that brings its own WSGI server needs none of this room
    BaseWSGIServer = Socket = object

# What is refused before the application sees it.
UNREADABLE = {
    400: "requisição inválida",
    408: "tempo esgotado",
    413: "payload grande demais",
    431: "cabeçalhos grandes demais",
    501: "Transfer-Encoding não suportado",
}


def unreadable(code):
    return Refusal(code, UNREADABLE[code])


# What stands in a head besides the ends of its lines; in a method, which is in capitals
# (RFC 9110 9.1); in a field's name.
PLAIN = bytes({9, *range(32, 127), *range(128, 256)})
METHOD = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NAME = METHOD + METHOD.lower()
AUTHORITY = re.compile(rb"(?i)https?://(\[[0-9a-f:.]+\]|[\w.~%-]+)(:[0-9]*)?")


@functools.lru_cache(maxsize=1024)  # senders repeat themselves
def field_key(name):
    """Where WSGI has a header; None where it could not tell it from another, since '_'
    is as '-' there. Refusal for what is no name, such as the start of a folded line."""
    if not name or name.translate(None, NAME):
        raise unreadable(400)
    return None if b"_" in name else environ_key(name.decode())


class Incoming:
    """A request as it arrives. It is read strictly (RFC 9112), since what a proxy in
    front understands in another way could smuggle a second one in, and in time linear
    in its bytes. `environ` is there when its head is, `file` when its body is to come.
    """

    HEAD = 65536  # bytes
    IN_MEMORY = 512 << 10  # bytes of a body whose sender is known
    environ = file = chunks = error = None
    is_complete = is_known = awaits_continue = False
    length, connection = 0, b""  # of the body; what the answer says of it

    def __init__(self, app, address):
        self.app, self.address = app, address
        self.begun = bytearray()  # the head, while it is not complete

    def received(self, data):
        """Takes bytes in and returns those behind its end. Refusal, or OSError where the
        body cannot be put aside."""
        if self.environ is None:
            data = self.in_head(data)
            if self.environ is None:
                return data
        return self.in_body(data)

    def in_head(self, data):
        before = len(self.begun)
        if before:
            self.begun += data
            data = self.begun
        end = data.find(b"\r\n\r\n", max(0, before - 3))
        if (len(data) if end < 0 else end) > self.HEAD:
            raise unreadable(431)
        if end >= 0:
            head, rest = bytes(data[:end]), bytes(data[end + 4 :])
            self.begun = b""
            self.environ = {"REQUEST_METHOD": "?", "REMOTE_ADDR": self.address}
            self.read_head(head)
            return rest
        start = before - (data[before - 1 : before] == b"\r")
        odd = data[start:].translate(None, PLAIN).replace(b"\r\n", b"")
        if odd.removesuffix(b"\r"):  # lines that end in LF, a TLS hello
            raise unreadable(400)
        if not before:
            self.begun += data
        return b""

    def read_head(self, head):
        line, *fields = head.split(b"\r\n")
        words = line.split(b" ")
        if (
            head.translate(None, PLAIN) != b"\r\n" * len(fields)
            or len(words) != 3
            or words[0].translate(None, METHOD)
            or words[2] not in (b"HTTP/1.1", b"HTTP/1.0")
            or b"\t" in line
        ):
            raise unreadable(400)
        method, target, version = words
        self.environ["REQUEST_METHOD"] = method.decode()
        self.read_target(target)
        self.read_fields(fields)
        self.read_framing(version == b"HTTP/1.1")

    def read_target(self, target):
        """In origin-form, or in absolute-form as for a proxy (RFC 9112 3.2)."""
        if not target.isascii():  # curl and PHP send raw UTF-8
            target = urllib.parse.quote(target, VISIBLE).encode()
        path = target.partition(b"#")[0]
        if not path.startswith(b"/"):
            host = AUTHORITY.match(path)
            path = path[host.end() :] if host else b""
            if path[:1] not in (b"/", b"?") and not (host and not path):
                raise unreadable(400)
        path, _, query = path.partition(b"?")
        if b"%" in path:
            path = urllib.parse.unquote_to_bytes(path)
        self.environ["PATH_INFO"] = "/" + path.lstrip(b"/").decode("latin-1")
        self.environ["QUERY_STRING"] = query.decode()
        self.environ["REQUEST_URI"] = target.decode()

    def read_fields(self, fields):
        environ, several = self.environ, {}
        for field in fields:
            name, colon, value = field.partition(b":")
            key = (field_key if len(name) < 64 else field_key.__wrapped__)(name)
            if not colon:
                raise unreadable(400)
            if key is None:
                continue
            value = value.strip(b" \t").decode("latin-1")
            if key in environ:
                several.setdefault(key, [environ[key]]).append(value)
            else:
                environ[key] = value
        for key, values in several.items():  # RFC 9110 5.3
            environ[key] = ", ".join(values)
        if "HTTP_HOST" in several:  # RFC 9112 3.2
            raise unreadable(400)

    def read_framing(self, is_current):
        """Where the request ends and whether the connection does (RFC 9112 6 and 9.3)."""
        environ = self.environ
        if is_current and "HTTP_HOST" not in environ:
            raise unreadable(400)
        options = environ.get("HTTP_CONNECTION", "").lower()
        options = {option.strip() for option in options.split(",")}
        if "close" in options:
            self.connection = CLOSE
        elif not is_current:
            self.connection = KEEP_ALIVE if "keep-alive" in options else CLOSE
            environ.pop("HTTP_EXPECT", None)
        coding = environ.pop("HTTP_TRANSFER_ENCODING", None)
        length = environ.get("CONTENT_LENGTH")
        if coding is not None:
            if not is_current or length is not None or "," in coding or not coding:
                raise unreadable(400)
            if coding.lower() != "chunked":
                raise unreadable(501)
            self.chunks = Chunks()
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) <= 18):
                raise unreadable(400)
            self.length = int(length)
            self.must_fit(self.length)

    def must_fit(self, length):
        if length > self.app.settings.max_body:
            raise unreadable(413)

    def in_body(self, data):
        if self.file is None and not self.chunks and len(data) >= self.length:
            return self.complete(io.BytesIO(data[: self.length]), data[self.length :])
        if self.file is None:
            self.begin_body(data)
        if self.chunks:
            rest = self.chunks.received(data, self.file)
            self.must_fit(self.file.tell())
            if rest is None:
                return b""
            self.environ["CONTENT_LENGTH"] = str(self.file.tell())
        else:
            missing = self.length - self.file.tell()
            self.file.write(data[:missing])
            if len(data) < missing:
                return b""
            rest = data[missing:]
        self.file.seek(0)
        return self.complete(self.file, rest)

    def begin_body(self, data):
        """Only who may send brings a body. Where it is signed that is known at its end:
        it stays in memory, where Server.hold() bounds it."""
        self.is_known = self.app.admit(self.environ)
        limit = self.IN_MEMORY if self.is_known else 0  # 0 is none
        self.file = tempfile.SpooledTemporaryFile(limit)  # noqa: SIM115 - goes with it
        expects = self.environ.get("HTTP_EXPECT", "").lower()
        self.awaits_continue = expects == "100-continue" and not data

    def complete(self, body, rest):
        self.environ["wsgi.input"] = body
        self.environ["wsgi.input_terminated"] = self.is_complete = True
        return rest

    def held(self):
        """Bytes in memory whose sender is not known yet."""
        if self.is_known or self.is_complete:
            return 0
        return len(self.begun) + (self.file.tell() if self.file else 0)


class Chunks:
    """A body in chunks (RFC 9112 7.1). Extensions and trailers are read over."""

    LINE, TRAILERS = 8192, 16384  # bytes
    SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[!-~][\t -~\x80-\xff]*)?")

    def __init__(self):
        self.rest = b""  # of a line that is not complete
        self.left = 0  # bytes of the chunk that are to come
        self.ends_line = self.is_last = False
        self.trailers = 0

    def received(self, data, file):
        """Writes the content to a file; what is behind it, or None while it goes on."""
        data, at = self.rest + data, 0
        while at < len(data):
            if self.left:
                piece = data[at : at + self.left]
                file.write(piece)
                at, self.left = at + len(piece), self.left - len(piece)
                self.ends_line = True
                continue
            end = data.find(b"\r\n", at, at + self.LINE)
            if end < 0:
                break
            line, at = data[at:end], end + 2
            if self.is_last and not line:
                return data[at:]
            self.read_line(line)
        self.rest = data[at:]
        if len(self.rest) >= self.LINE or b"\n" in self.rest:
            raise unreadable(400)
        return None

    def read_line(self, line):
        if self.is_last:
            self.trailers += len(line)
            name, colon, _ = line.partition(b":")
            if not colon or name.translate(None, NAME) or line.translate(None, PLAIN):
                raise unreadable(400)
        elif self.ends_line:  # of a chunk's content
            if line:
                raise unreadable(400)
            self.ends_line = False
        else:
            found = self.SIZE.fullmatch(line)
            if not found:
                raise unreadable(400)
            self.left = int(found[1], 16)
            self.is_last = not self.left
        if self.trailers > self.TRAILERS:
            raise unreadable(431)


CLOSE, KEEP_ALIVE = b"Connection: close\r\n", b"Connection: keep-alive\r\n"


@functools.lru_cache(maxsize=1)
def http_date(seconds):
    return f"Date: {email.utils.formatdate(seconds, usegmt=True)}\r\n".encode()


class Channel(Socket):
    """A connection. It takes up the next request when the answer before it has left."""

    RECEIVE = 65536  # bytes at once: bodies of 100 kB take half as long as with 8192
    IDLE, LINGER = 120, 30  # seconds
    events = selectors.EVENT_READ  # what it is registered for
    request = None  # an Incoming: the one that arrives or waits for its reply
    reply = None  # to that one
    closes = lingers = draining = False
    wait_for = number = until = None  # of a request that waits: for what, in what place

    def __init__(self, server, sock, address):
        super().__init__(sock, server.map)
        self.server, self.addr, self.connected = server, address, True
        self.ahead = b""  # what has come behind the request
        self.out = []  # what is to be sent
        # when what it does has begun, and when a request was complete last
        self.since = self.progress = time.monotonic()

    def check(self, now, request_timeout):
        """Ends what takes too long; called every second with monotonic seconds. A byte
        every two seconds does not help."""
        spent = now - self.since
        if self.request:
            if spent >= request_timeout and not self.request.is_complete:
                self.refuse(unreadable(408))
        elif spent >= (self.LINGER if self.draining else self.IDLE):
            self.handle_close()

    def handle_read(self):
        try:
            data = self.recv(self.RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            self.handle_close()
            return
        if data and not self.draining:
            self.received(data)

    def received(self, data):
        if not self.request:
            data = data.lstrip(b"\r\n")  # some end a body with a line (RFC 9112 2.2)
            if not data:
                return
            self.since = time.monotonic()
            self.request = Incoming(self.server.app, self.addr[0])
        request = self.request
        try:
            self.ahead = request.received(data)
        except Exception as error:  # noqa: BLE001 - answered as any other
            self.refuse(error)
            return
        if request.is_complete:
            self.progress = time.monotonic()
            self.server.rounds.add_task(self)
        elif request.awaits_continue:
            request.awaits_continue = False
            with contextlib.suppress(OSError):
                self.socket.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.server.hold(self, request.held())

    def refuse(self, error):
        """Answers instead of reading on."""
        self.request.error, self.request.file, self.ahead = error, None, b""
        self.server.rounds.add_task(self)

    def give_way(self):
        """Others need the memory that it holds."""
        if self.request:
            self.refuse(too_full("MAX_UNVERIFIED"))
        else:
            self.handle_close()

    def park(self):
        """Waits for a message; out of the map it costs the loop nothing."""
        self.del_channel()

    def answer(self):
        """Sends the reply, if somebody is there to have it."""
        if not self.connected:
            return
        if self._fileno is None:  # it was parked
            self.set_socket(self.socket)
        request, reply, self.request = self.request, self.reply, None
        self.lingers = request.error is not None
        if self.lingers or self.server.rounds.closing:
            request.connection = CLOSE
        self.closes = request.connection is CLOSE
        date = http_date(int(time.time()))
        head = b"%b%b%b\r\n" % (reply.head, date, request.connection)
        if request.environ and request.environ["REQUEST_METHOD"] == "HEAD":
            self.out = [head]
        elif len(reply.body) < 4096:
            self.out = [head + reply.body]
        else:
            self.out = [head, reply.body]
        self.since = time.monotonic()
        self.handle_write()
        if self.out:
            self.server.hold(self, len(self.ahead))

    def handle_write(self):
        """Sends what the client takes. It is told of a refusal also when it still sends:
        closing with input unread would reset the connection, and it would see that
        instead of the answer, so what comes is read and thrown away (RFC 9112 9.6)."""
        while self.out:
            try:
                sent = self.send(self.out[0])
            except OSError:
                self.handle_close()
            if not self.connected:
                return
            if sent < len(self.out[0]):
                self.out[0] = memoryview(self.out[0])[sent:]
                self.since = time.monotonic() if sent else self.since
                break
            del self.out[0]
        if not self.out:
            self.has_answered()
        self.watch()

    def has_answered(self):
        if self.lingers:
            self.lingers, self.draining = False, True
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
        elif self.closes and not self.draining:
            self.handle_close()
        elif self.ahead:
            self.received(self.ahead)

    def watch(self):
        """Registers for what it waits for now."""
        events = selectors.EVENT_WRITE if self.out else selectors.EVENT_READ
        if events != self.events and self.connected:
            self.events = events
            self._map.selector.modify(self._fileno, events, self)

    def hung_up(self):
        """Nobody reads a connection that waits, so it has to be looked at."""
        watch = select.poll()
        watch.register(self.socket, getattr(select, "POLLRDHUP", select.POLLHUP))
        return bool(watch.poll(0))

    def is_broken(self):
        """Whether the client has reset it since it asked."""
        return self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def idle(self):
        return self.draining or not (self.request or self.out)

    def handle_error(self):
        where = trail(sys.exc_info()[1])
        self.server.app.trouble(where, "a connection is closed: %s", where)
        self.handle_close()

    def handle_close(self):
        self.server.hold(self, 0)
        self.close()


class Sockets(dict):
    """waitress's map of sockets by descriptor. Each is registered with the selector
    once: a set that is built anew for each round takes longer than its requests."""

    def __init__(self):
        super().__init__()
        self.selector = selectors.DefaultSelector()

    def __setitem__(self, descriptor, item):
        self.selector.register(descriptor, selectors.EVENT_READ, item)
        super().__setitem__(descriptor, item)

    def __delitem__(self, descriptor):
        self.selector.unregister(descriptor)
        super().__delitem__(descriptor)

    def turn(self, timeout):
        """Lets each that is ready read or write; waits `timeout` seconds for the first."""
        for key, events in self.selector.select(timeout):
            if self.get(key.fd) is key.data:  # nobody has closed it meanwhile
                is_read = events & selectors.EVENT_READ
                (wasyncore.read if is_read else wasyncore.write)(key.data)


# Refusals that were decided without the store, and stay when its commit fails.
DECIDED = (400, 401, 403, 405, 408, 411, 413, 429, 431, 501)


class Rounds:
    """waitress's task dispatcher, without threads.

    It collects the requests of one round of the loop. answer() puts them through the
    application in one transaction and lets the answers go after the commit: a burst of
    200 webhooks costs one sync, and threads would only hand the GIL to and fro.

    Senders come first: what may take long has a BUDGET in each round, but at least one
    gets its turn, and goes on in the next one.

    A request whose reply can wait is parked, and asked again in a round that has changed
    something. Of those that wait for the same only the first is asked.
    """

    CROWD = 8  # requests in one round
    BUDGET = 0.05  # seconds

    def __init__(self, app, room, delivery=None):
        self.app, self.delivery = app, delivery
        self.room = room  # for so many parked requests
        self.waiting = []  # channels with a request to answer in this round
        self.parked = {}  # what they wait for: deque of channels
        self.by_time = set()  # those of them that no change brings
        self.until = math.inf  # when the first of them has waited long enough
        self.closing = False  # the server stops, and connections end with their answer
        self._numbers = itertools.count()
        self._changes = 0
        self._began = 0  # when the first of `waiting` was complete
        self._spent = math.inf  # when this round's budget is
        self.behind = set()  # of those that wait, who could have been asked

    def add_task(self, channel):
        if not self.waiting:
            self._began = time.monotonic()
        self.waiting.append(channel)

    def answer(self, look=False):
        """Answers what waits; with `look` also what a change of time has made due."""
        asked, self.waiting = [c for c in self.waiting if c.connected], []
        due = self.delivery and self.delivery.due(look)
        if not asked and not due and not self.behind and not (look and self.parked):
            return
        began = self._began
        for channel in asked:
            channel.reply, channel.environ = None, {}
        woken = self.commit(asked, look)
        self.waiting += [channel for channel in asked if not channel.reply]
        asked = [channel for channel in asked if channel.reply]
        for channel in dict.fromkeys(asked + woken):
            if channel.wait_for:
                channel.park()
            else:
                channel.answer()
        # counted from when the first of them was complete: too long for the others, by
        # less than it took to read them; those that wait want to wait
        routes = [c.environ.get("buffer.route") for c in asked if not c.wait_for]
        self.app.answered(routes, time.monotonic() - began)

    def commit(self, asked, look):
        """Makes the replies in one transaction. Returns who has waited and has one now."""
        woken, delivery, commits = [], self.delivery, self.app.store.commits
        try:
            with self.app.store.transaction():
                before = commits.sum
                slow = [channel for channel in asked if not self.ask_if_quick(channel)]
                self._spent = time.monotonic() + self.BUDGET
                for channel in slow:
                    if channel.is_broken():
                        channel.reply = UNAVAILABLE  # a claim would be in vain
                    else:
                        self.ask(channel)
                    if time.monotonic() >= self._spent:
                        break
                if delivery:
                    delivery.turn(look, crowded=len(asked) >= self.CROWD)
                woken = self.wake([c for c in asked if c.wait_for], look)
        except sqlite3.Error as error:
            self.fail(asked + woken, self.app.failed(error))
            return woken
        if asked and commits.sum > before:
            self.app.shared.observe(len(asked))
        if delivery:
            delivery.committed()
        return woken

    def ask_if_quick(self, channel):
        """Whether it was: a webhook that came in one piece, or a refusal."""
        request = channel.request
        if request.error or (
            not request.file and request.environ["PATH_INFO"].startswith("/webhook")
        ):
            self.ask(channel)
        return channel.reply

    def ask(self, channel):
        channel.reply = reply = self.reply(channel)
        if reply.wait:  # at once, so that the next one sees the room
            self.enter(channel)

    def fail(self, channels, failure):
        """In place of replies that depended on the transaction."""
        for channel in channels:
            if not channel.reply or channel.reply.code not in DECIDED:
                channel.reply = failure
                self.leave(channel)
        if self.delivery:
            self.delivery.rolled_back()

    def reply(self, channel):
        request, address = channel.request, channel.addr[0]
        environ = request.environ or {"REQUEST_METHOD": "?", "REMOTE_ADDR": address}
        channel.environ = environ
        if isinstance(request.error, Refusal):
            return self.app.refuse(request.error, environ)
        if request.error:
            return self.app.failed(request.error)
        if self.room > 0 and not self.closing:
            environ["buffer.wait"] = "later"
        return self.app.respond(environ)

    def wake(self, fresh, look):
        """Asks those that wait and for whom there may be something, in the order in which
        they came. Returns who has an answer, and who has hung up."""
        woken, kinds = [], set(self.parked)
        if look:
            gone = [channel for channel in self.everybody() if channel.hung_up()]
            woken += map(self.dismiss, gone)
        else:
            if self.app.store.changes() == self._changes:  # nothing new for the others
                kinds.clear()
            kinds -= self.by_time
            kinds.update(channel.wait_for for channel in fresh)
        kinds |= self.behind
        self.behind = set()
        while kinds.intersection(self.parked):
            kinds.intersection_update(self.parked)
            if woken and time.monotonic() >= self._spent:
                self.behind = kinds
                break
            kind = min(kinds, key=lambda kind: self.parked[kind][0].number)
            channel = self.parked[kind][0]
            if channel.hung_up():
                woken.append(self.dismiss(channel))
                continue
            reply = self.app.respond({**channel.environ, "buffer.wait": "now"})
            if reply.wait:
                kinds.remove(kind)
            else:
                channel.reply = reply
                self.leave(channel)
                woken.append(channel)
        self._changes = self.app.store.changes()
        return woken

    def dismiss(self, channel):
        self.leave(channel)
        channel.handle_close()
        return channel

    def everybody(self):
        return [channel for queue in self.parked.values() for channel in queue]

    def enter(self, channel):
        channel.wait_for, channel.number = channel.reply.wait_for, next(self._numbers)
        channel.until = time.monotonic() + channel.reply.wait
        self.until = min(self.until, channel.until)
        self.parked.setdefault(channel.wait_for, collections.deque()).append(channel)
        if channel.reply.by_time:
            self.by_time.add(channel.wait_for)
        self.room -= 1

    def leave(self, channel):
        if channel.wait_for:
            queue = self.parked[channel.wait_for]
            queue.remove(channel)
            if not queue:
                del self.parked[channel.wait_for]
                self.by_time.discard(channel.wait_for)
            channel.wait_for = None
            self.room += 1

    def expire(self, now):
        """Answers those that have waited long enough; all, when the server stops."""
        if now >= self.until or self.closing:
            for channel in self.everybody():
                if now >= channel.until or self.closing:
                    self.leave(channel)
                    channel.answer()
            self.until = min((c.until for c in self.everybody()), default=math.inf)


class SteadyClock:
    """Seconds since the epoch, which do not jump when somebody sets the clock.

    A lease must not end by that. `offset` is to the monotonic clock.
    """

    def __init__(self, wall=time.time, monotonic=time.monotonic):
        self.wall, self.monotonic = wall, monotonic
        self.offset = wall() - monotonic()

    def __call__(self):
        return self.monotonic() + self.offset

    def step(self):
        """How many seconds the wall clock is ahead."""
        return self.wall() - self()


class Server:
    """The sockets and the loop. All of it runs on the thread that calls run(), so
    nothing may wait for that thread."""

    GRACE, QUIET = 10, 0.5  # seconds to finish, and for connections that stay silent

    def __init__(self, settings, app, sockets, clock, delivery=None):
        self.timeout, self.app, self.clock = settings.request_timeout, app, clock
        self.delivery = delivery
        limit = descriptor_limit()
        self.rounds = Rounds(app, min(limit // 8, 2000), delivery)
        # each of the others may have a temporary file; threads of delivery have sockets
        self.limit = max(8, (limit * 7 // 8 - 64) // 2)
        self.map = Sockets()
        self.held, self.holding = (
            {},
            0,
        )  # channel: bytes of senders not known; their sum
        self.most = max(settings.max_unverified, settings.max_body + Incoming.HEAD)
        self.stopping = False
        self._checked = time.monotonic()
        create_server(
            app,  # not called by waitress: the rounds ask it for replies
            map=self.map,
            _dispatcher=self.rounds,
            sockets=sockets,
            backlog=4096,
            clear_untrusted_proxy_headers=False,  # client_address() knows whom to trust
        )
        kinds = self.map.values()
        self.listeners = [item for item in kinds if isinstance(item, BaseWSGIServer)]
        for listener in self.listeners:
            listener.handle_accept = functools.partial(self.accept, listener)
        app.connections = lambda: len(self.channels())
        if delivery:
            delivery.loop_wake = self.listeners[0].trigger.pull_trigger

    def run(self):
        """Serves until SIGTERM or SIGINT, then finishes what has begun."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        notify("READY=1")
        while not self.stopping:
            self.round(1)
        notify("STOPPING=1")
        self.drain()

    def stop(self, *_):
        """The signal handler. A second signal ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        self.stopping = True
        self.listeners[0].trigger.pull_trigger()  # poll() goes on after a handler

    def round(self, timeout):
        until = self.rounds.until
        if self.delivery:
            until = min(until, self.delivery.until)
        timeout = min(timeout, max(0, until - time.monotonic()))
        if self.rounds.waiting or self.rounds.behind:
            timeout = 0
        self.map.turn(timeout)
        self.rounds.answer()
        now = time.monotonic()
        self.rounds.expire(now)
        self.app.tick(now)
        if now - self._checked >= 1:
            self._checked = now
            self.each_second(now)

    def accept(self, listener):
        """All that wait: one a round, as in waitress, lets a burst wait for seconds."""
        while listener.accepting:
            if len(self.map) > self.limit:
                self.make_room()
            try:
                found = listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # it has hung up already
                self.make_room()
                return
            if not found:
                return
            listener.set_socket_options(found[0])
            Channel(self, found[0], listener.fix_addr(found[1]))

    def make_room(self):
        """Closes a hundredth of the connections, those whose last complete request is
        the longest ago: whatever else they send is no progress."""
        count = self.limit // 100 + 1
        slow = heapq.nsmallest(count, self.channels(), key=lambda c: c.progress)
        for channel in slow:
            channel.handle_close()
        self.app.dropped(len(slow), self.limit)

    def hold(self, channel, size):
        """Notes the bytes in memory that a channel has of a sender who is not known yet.

        Together they have `most`; beyond that those that began first have to go.
        """
        before = self.held.pop(channel, 0) if not size else self.held.get(channel, 0)
        if size:
            self.held[channel] = size
        self.holding += size - before
        while self.holding > self.most:
            first = next(iter(self.held))
            self.holding -= self.held.pop(first)
            first.give_way()

    def addresses(self):
        for listener in self.listeners:
            name = listener.socket.getsockname()
            yield name if isinstance(name, str) else f"{name[0]} port {name[1]}"

    def channels(self):
        return [item for item in self.map.values() if isinstance(item, Channel)]

    def each_second(self, now):
        for channel in self.channels():
            channel.check(now, self.timeout)
        self.rounds.answer(look=True)
        notify("WATCHDOG=1")
        step = round(self.clock.step())
        if step:
            try:
                self.app.store.shift(step)
                self.clock.offset += step
                log.warning(
                    "the clock was set by %+d seconds, and leases with it", step
                )
            except sqlite3.Error as error:
                self.app.failed(error)

    def drain(self):
        """Takes in what the kernel has queued, stops listening, answers what has begun.

        Connections are told to close with their answer; one that is silent is closed.
        """
        self.rounds.closing = True
        self.rounds.expire(math.inf)
        if self.delivery:
            self.delivery.closing, self.delivery.until = True, math.inf
        for listener in self.listeners:
            listener.handle_accept()
            listener.accepting = False
            listener.del_channel()
            listener.socket.close()
        began = time.monotonic()
        while self.busy() and time.monotonic() - began < self.GRACE:
            self.round(0.05)
            if time.monotonic() - began >= self.QUIET:
                for channel in filter(Channel.idle, self.channels()):
                    channel.handle_close()

    def busy(self):
        return self.channels() or (self.delivery and self.delivery.busy())


def listen(addr):
    """Listening sockets: those that systemd holds (sd_listen_fds(3)), else `addr`."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        given = os.environ.get("LISTEN_FDS", "")
        if given.isdecimal() and int(given):
            return [socket.socket(fileno=3 + n) for n in range(int(given))]
    host, port = addr
    try:
        if host == "unix":
            return [listen_unix(port)]
        if not host:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return [socket.create_server(addr, family=family, dualstack_ipv6=both)]
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return [socket.create_server(where[:2], family=family)]
    except (OSError, UnicodeError) as error:
        raise StartError(f"cannot listen on ADDR {host}:{port}: {error}") from error


def listen_unix(path):
    """A socket for this user and group, in place of one that a dead process left."""
    with socket.socket(socket.AF_UNIX) as probe:
        if os.path.exists(path):
            if probe.connect_ex(path) == 0:
                raise OSError("another process listens there")
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise OSError("there is something else than a socket")
            os.unlink(path)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    os.chmod(path, 0o660)
    return server


def descriptor_limit():
    """Raises the limit of open files as far as it goes, up to 65536; the limit now."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def notify(state):
    """Tells systemd, when it listens (sd_notify(3))."""
    name = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
    if name:
        messenger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with messenger, contextlib.suppress(OSError):
            messenger.sendto(state.encode(), name)


# Main


def open_store(settings, clock):
    keys = [settings.group_key, *(source.group_key for _, source in settings.sources)]
    return Store(
        settings.db_path,
        clock,
        settings.max_attempts,
        settings.backoff,
        grouped=any(keys),
    )


def forwards(settings):
    return [settings.forward_url, *(source.forward for _, source in settings.sources)]


def open_delivery(settings, store):
    """The Delivery, if there is anywhere to deliver to; its threads run at once."""
    if any(forwards(settings)):
        delivery = Delivery(settings, store)
        places = ", ".join(target.where for target in delivery.targets)
        log.info("delivers to %s", places)
        return delivery
    if settings.forward_group or settings.forward_header:
        raise StartError("FORWARD_GROUP or a header is set, but not FORWARD_URL", 2)
    store.leave_out(False)
    return None


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record):
        when = f"{utc(record.created)}.{int(record.msecs):03}Z".replace(" ", "T")
        line = {"time": when, "level": record.levelname, "message": record.getMessage()}
        return to_json({**line, **getattr(record, "fields", {})})


EXAMPLES = b"a-long-random-secret", b"um-segredo-longo-e-aleatorio"  # README's


class PatientLog(logging.StreamHandler):
    """Leaves lines out while nobody reads them: a full pipe would stop the service.

    A pipe that is ready takes PIPE_BUF bytes, 4,096 on Linux, at once.
    """

    LONGEST = 4000  # bytes
    lost = 0

    def format(self, record):
        line = super().format(record)
        if self.lost:
            line, self.lost = f"{self.lost} lines were lost, nobody read\n{line}", 0
        return line.encode(errors="replace")[: self.LONGEST].decode(errors="ignore")

    def emit(self, record):
        ready = [self.stream]
        with contextlib.suppress(OSError, ValueError):  # no descriptor, not on Windows
            _, ready, _ = select.select([], ready, [], 0)
        if ready:
            super().emit(record)
        else:
            self.lost += 1


def start_log(settings):
    handler = PatientLog()
    handler.addFilter(discreet)  # for what others log, such as waitress
    form = "%(asctime)s %(levelname)s %(message)s"
    is_json = settings.log_format == "json"
    handler.setFormatter(JsonLines() if is_json else logging.Formatter(form))
    logging.basicConfig(handlers=[handler], level=settings.log_level)
    logging.getLogger("waitress").setLevel(logging.ERROR)
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # Relay says what is wrong
    logging.raiseExceptions = False  # or a slip in a log line would print its values
    for name, source in settings.sources:
        for secret in (source.secret, source.secret_old):
            if secret and len(secret.removeprefix(b"whsec_")) < 16:
                log.warning("SECRET_%s is shorter than 16 characters", name)


def told_settings(environ):
    """What is set, for the log: names, and values where they are no secret."""
    for _, name, facts in settings_of(Settings):
        if environ.get(name):
            secret = facts["default"] is None
            yield name if secret else f"{name}={environ[name]}"


def is_private(sock):
    """Whether only this machine reaches a listening socket, and no proxy's clients."""
    host = sock.getsockname()
    return not isinstance(host, str) and ipaddress.ip_address(host[0]).is_loopback


def refuse_weak_tokens(settings, is_private):
    """StartError for tokens that can be guessed, or read in README, unless nobody else
    can try."""
    others = (settings.webhook_token or ()) + (settings.metrics_token or ())
    if any(len(t) < 16 or t in EXAMPLES for t in settings.token + others):
        text = "a token is shorter than 16 characters or an example, and can be guessed"
        if not is_private:
            raise StartError(f"{text}. Try: TOKEN={secrets.token_urlsafe(32)}", 2)
        log.warning("%s", text)


def log_crash(kind, error, trail):
    """In place of sys.excepthook, which prints the exception's text."""
    log.critical("crashed", exc_info=(kind, error, trail))


@functools.lru_cache(maxsize=1)
def hosted(pid):
    """(App, Housekeeper) of this process: a database connection must not be forked."""
    settings = Settings.read(os.environ)
    refuse_weak_tokens(settings, is_private=False)
    store = open_store(settings, time.time)
    start_log(settings)
    if settings.alert_url:
        log.warning("ALERT_URL is told nothing: alarms need python buffer.py")
    if any(forwards(settings)):
        log.warning("nothing is delivered: FORWARD_URL needs python buffer.py")
    return App(settings, store), Housekeeper(settings, store)


def application(environ, start_response):
    """The WSGI application for another server; each request is a transaction."""
    try:
        app, housekeeper = hosted(os.getpid())
    except StartError as error:
        log.error("%s", error)
        return UNAVAILABLE.wsgi(environ, start_response)
    now = time.monotonic()
    app.tick(now)
    housekeeper.nudge(now)
    return app(environ, start_response)


def parse_arguments(argv):
    lines = ["settings, from the environment:"]
    rows = [*settings_of(Settings), *settings_of(SourceSettings)]
    for _, name, facts in rows:
        lines.append(f"  {name}, default {facts['default'] or 'none'}")
        lines.append(f"      {facts['meaning']};")
        lines.append(f"      takes {facts['parse'].__doc__}")
    parser = argparse.ArgumentParser(
        prog="buffer.py",
        description="A webhook buffer: senders are answered at once, consumers take "
        "their time. Without a command it runs the service.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(run=run_service)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for run, name in ((show_status, "status"), (make_backup, "backup")):
        about, _, more = run.__doc__.partition("\n\n")
        command = commands.add_parser(name, help=about, description=about + more)
        command.set_defaults(run=run)
        if run is make_backup:
            command.add_argument("file", metavar="FILE", help="must not be there yet")
    return parser.parse_args(argv)


def configured_file():
    """What the commands read: DB_PATH; they need no other setting."""
    found = {"DB_PATH": os.environ.get("DB_PATH")}
    return ReadOnlyStore(read_settings(Settings, found)["db_path"])


def show_status(_):
    """Shows what is in the file of DB_PATH.

    The same as GET /metrics, whether the service runs or not. It changes nothing.
    """
    with contextlib.closing(configured_file()) as store:
        table = status_table(store.report(), store.problems())
    try:
        print(table, flush=True)
    except BrokenPipeError:  # who reads has seen enough, as in status | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def status_table(report, problems=()):
    """What /metrics tells of the file, for a person; first what is wrong."""
    wrong = [
        (f"wrong since {utc(since)} UTC (as of {utc(seen)}):", text)
        for _, _, since, seen, text in problems
    ]
    rows = collections.defaultdict(dict)
    for row in report["mensagens"]:
        rows[row["fonte"] or "-"][row["status"]] = row["quantidade"]
    table = [("source", *STATUSES)]
    table += [(name, *(n.get(s, 0) for s in STATUSES)) for name, n in rows.items()]
    age, minutes = report["mais_antiga"], report["por_minuto"]
    facts = [("oldest due", "none" if age is None else f"{age} s")]
    for at, name in ((1, "received"), (2, "done"), (3, "failed")):
        last = [minute[at] for minute in minutes]
        facts.append((f"{name} in the last minute, hour", f"{last[-2]}, {sum(last)}"))
    for key, name in ("arquivo", "database"), ("wal", "WAL"), ("livre", "disk free"):
        facts.append((name, f"{report[key] / (1 << 20):.1f} MiB"))
    for key, name, _ in TALKS if report["conversas"] else ():
        facts.append((f"conversations_{name}", report["conversas"][key] or 0))
    for key, (name, *_) in COUNTERS.items():
        for label, n in report["contadores"][key].items() or [("", 0)]:
            facts.append((f"{name} {label}".strip(), n))
    parts = [wrong, table, facts] if wrong else [table, facts]
    return "\n\n".join(map(aligned, parts))


def aligned(rows):
    """Lines with columns."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    return "\n".join(
        "  ".join(map("{:<{}}".format, row, widths)).rstrip() for row in rows
    )


def make_backup(arguments):
    """Copies the file of DB_PATH, also while the service runs.

    The copy is checked, is one file, and holds what was on disk when it began. Nothing
    is ever overwritten.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, which leaves nothing
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    target = os.path.abspath(arguments.file)
    if os.path.lexists(target):
        raise StartError(f"{target} is there already")
    try:
        beside = tempfile.TemporaryDirectory(dir=os.path.dirname(target))
        with beside as folder, contextlib.closing(configured_file()) as store:
            draft = os.path.join(folder, "copy")
            store.backup(draft, show_progress if sys.stderr.isatty() else None)
            os.chmod(draft, 0o600)
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
            os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o600))  # the name is ours
            os.replace(draft, target)
    except (sqlite3.Error, OSError) as error:
        raise StartError(f"no backup: {error}") from error
    print(f"{target}: {os.path.getsize(target)} bytes, checked")


def show_progress(_, remaining, total):
    percent = 100 - 100 * remaining // max(total, 1)
    end = "" if remaining else "; checking\n"
    print(f"\r{percent} %", end=end, file=sys.stderr, flush=True)


def run_service(_):
    if BaseWSGIServer is object:  # the import above has failed
        pip = f"{sys.executable} -m pip install -U waitress"
        hint = f"{pip}, or apt install python3-waitress"
        raise StartError(f"waitress 2.1.2 or newer is missing. Try: {hint}")
    settings = Settings.read(os.environ)
    start_log(settings)
    sys.excepthook = log_crash
    threading.excepthook = lambda crash: log_crash(*crash[:3])
    clock = SteadyClock()
    store = open_store(settings, clock)
    app = App(settings, store)
    app.delivery = app.watch.delivery = delivery = open_delivery(settings, store)
    sockets = listen(settings.addr)
    refuse_weak_tokens(settings, all(map(is_private, sockets)))
    server = Server(settings, app, sockets, clock, delivery)
    threads = [Housekeeper(settings, store)]
    if settings.alert_url:
        threads.append(Alarms(settings, app.watch))
    for thread in threads:
        thread.start()
    where = ", ".join(server.addresses())
    log.info("%s listens on %s, keeps %s", __version__, where, settings.db_path)
    log.info("settings: %s", ", ".join(told_settings(os.environ)))
    server.run()
    app.flush(gap=0)
    if delivery:
        delivery.stop()
    for thread in threads:
        thread.stop()
    store.close()
    log.info("stopped")


def main(argv=None):
    """The command line; the exit status."""
    arguments = parse_arguments(argv)
    try:
        return arguments.run(arguments) or 0
    except StartError as error:
        print(f"buffer.py: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130  # as a shell calls an end by SIGINT


if __name__ == "__main__":
    sys.exit(main())
