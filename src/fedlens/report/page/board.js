"use strict";
/* The board: a list of runs, one run, or several, by the part of the address behind #. Data come from /api, changes from /events. */
{
  const { h, number, seconds, words, spark } = Draw;
  const main = document.getElementById("main");
  let stream = null;  // the events of the page that is shown
  let turn = 0;  // counts pages: one that was slow to load must not replace the one that was asked for after it
  const chosen = new Set();

  const address = (kind, names) => `#/${kind}/${names.map(encodeURIComponent).join("/")}`;
  const query = (key, names) => names.map((n) => `${key}=${encodeURIComponent(n)}`).join("&");
  async function get(url) {
    const answer = await fetch(url), body = await answer.json().catch(() => ({}));
    if (!answer.ok) throw Object.assign(new Error(body.error || `The board answered ${answer.status}.`), { status: answer.status });
    return body;
  }
  function decoded(part) {
    try { return decodeURIComponent(part); } catch { throw new Error("This address cannot be read: a % in it stands for nothing."); }
  }
  const home = () => h("a", { href: "#/", text: "FedLens board" });
  function complain(text) { main.replaceChildren(h("header", {}, h("div", { class: "masthead" }, h("div", {}, h("div", { class: "brand" }, home()), h("h1", { text: "Nothing to show" })))), h("ul", { class: "problems" }, h("li", { text }))); }

  /* One connection a page. Whenever it opens everything is fetched again: what changed before that would be missed. */
  function listen(url, changed, again) {
    const source = stream = new EventSource(url);
    source.addEventListener("change", (e) => changed(JSON.parse(e.data)));
    source.addEventListener("open", again);
    source.addEventListener("error", () => {  // a browser tries again by itself, but not after a refusal, as for a run that is gone
      if (source.readyState !== EventSource.CLOSED || source !== stream) return;
      again();
      setTimeout(() => { if (source === stream) listen(url, changed, again); }, 3000);
    });
  }

  // ---- one run, or several
  function missing(gone, leftOut, shown) {
    const lines = gone.map((name) => `${name} is not there: it was deleted or renamed.`);
    if (leftOut) lines.push(`Only the first ${shown} of ${shown + leftOut} runs are compared; ${leftOut} did not fit.`);
    return lines;
  }
  async function show(names, comparing, current) {
    const fetchAll = () => get(`/api/run?${query("name", names)}`), notes = h("div", { role: "status" });
    const say = (lines) => notes.replaceChildren(lines.length ? h("ul", { class: "problems" }, lines.map((text) => h("li", { text }))) : "");
    const { views, gone, left_out: leftOut } = await fetchAll();
    if (!current()) return;
    const page = comparing ? View.comparison(views, home(), names.length > 1 ? `${views.length} runs side by side` : names[0]) : View.run(views[0], home());
    const link = comparing ? "" : h("p", { class: "small", style: "margin-top:48px" }, h("a", { href: `/report?${query("run", names)}`, text: "Save this page as one file" }));
    main.replaceChildren(notes, page.node, link);
    say(missing(gone, leftOut, views.length + gone.length));
    document.title = `${comparing ? "Comparison" : names[0]} · FedLens`;
    let busy = false, more = false, later = 0;
    async function renew() {
      clearTimeout(later);
      try {
        const next = await fetchAll();
        if (!current()) return;
        page.update(comparing ? next.views : next.views[0]);
        say(missing(next.gone, next.left_out, next.views.length + next.gone.length));
      } catch (error) {  // anything but a 404 may pass: the folder may be in the middle of a change, or the board away
        if (current() && error.status === 404) say([`${comparing ? "These runs are" : "This run is"} no longer there: deleted or renamed. Below is what was last known.`]);
        later = setTimeout(() => { if (current()) refresh(); }, 3000);  // it may be back before the stream ever saw it gone
      }
    }
    async function refresh() {  // news that arrive while some are being fetched are fetched once, after them
      if (busy) { more = true; return; }
      busy = true;
      await renew();
      busy = false;
      if (more && current()) { more = false; refresh(); }
    }
    listen(`/events?${query("run", names)}`, refresh, refresh);
  }

  // ---- the list
  const COLUMNS = [
    ["name", "Run", (c) => c.name], ["status", "Status", (c) => c.status], ["task", "Task", (c) => c.title.task || ""], ["algorithm", "Algorithm", (c) => (c.title.algorithm || []).join(" + ")],
    ["done", "Rounds", (c) => c.done], ["metric", "Result", (c) => { const m = best(c); return m ? m[1] : -Infinity; }], ["loss", "Loss", (c) => c.loss.at(-1) ?? Infinity], ["seconds", "Time", (c) => c.seconds ?? 0], ["changed", "Changed", (c) => c.changed],
  ];
  const best = (card) => { const name = View.chief(Object.keys(card.metrics))[0]; return name ? [name, card.metrics[name]] : null; };
  const breakable = (name) => name.split(/(?<=[/_])/).flatMap((part, k) => (k ? [h("wbr"), part] : [part]));  // a long name goes on in the next line between its words
  const isRun = (card) => !["empty", "not a run", "broken"].includes(card.status);  // what is no run comes last, however the list is sorted
  const ago = (t) => { const s = Date.now() / 1000 - t; return s < 60 ? "now" : s < 3600 ? `${Math.floor(s / 60)} min ago` : s < 86400 ? `${Math.floor(s / 3600)} h ago` : new Date(t * 1000).toLocaleDateString("en-CA"); };
  const state = { text: "", status: "", sort: "changed", down: true, settings: [] };
  const setting = (card, key) => { const v = card.settings?.[key]; return v === undefined ? "" : v.replace(/^"|"$/g, ""); };
  const inOrder = (text) => (text !== "" && Number.isFinite(+text) ? +text : text);  // numbers as numbers

  async function list(current) {
    const { root, runs } = await get("/api/runs");
    if (!current()) return;
    const cards = new Map(runs.map((c) => [c.name, c])), rows = new Map(), body = h("tbody"), count = h("p", { class: "soft small", role: "status" });
    const compare = h("button", { type: "button", onclick: () => { location.hash = address("compare", [...chosen]); } });
    const search = h("input", { type: "search", placeholder: "Filter by name, task or algorithm", "aria-label": "Filter runs", value: state.text, oninput: () => { state.text = search.value; arrange(); } });
    const status = h("select", { "aria-label": "Status", onchange: () => { state.status = status.value; arrange(); } }, ["", "running", "finished", "stopped", "empty", "not a run", "broken"].map((v) => h("option", { value: v, text: v || "any status", selected: v === state.status })));
    const extra = h("select", { "aria-label": "Add a setting as a column", onchange: () => { if (extra.value) { state.settings.push(extra.value); rebuild(); } } });
    const headRow = h("tr");
    let heads = [];
    const makeHead = ([id, text]) => h("th", { scope: "col", "data-column": id, class: ["done", "metric", "loss", "seconds", "changed"].includes(id) ? "n" : null }, h("button", { type: "button", text, onclick: () => { state.down = state.sort === id ? !state.down : !["name", "status", "task", "algorithm"].includes(id); state.sort = id; arrange(); } }));
    const columns = () => [...COLUMNS, ...state.settings.map((key) => [`set:${key}`, key.split(".").slice(-2).join("."), (c) => inOrder(setting(c, key))])];
    /* The heads, and in the menu the settings in which the runs differ. */
    function rebuild() {
      const keys = new Set([...cards.values()].flatMap((c) => Object.keys(c.settings || {})));
      const differ = [...keys].filter((k) => !state.settings.includes(k) && new Set([...cards.values()].filter(isRun).map((c) => setting(c, k))).size > 1).sort();
      extra.replaceChildren(h("option", { value: "", text: "Add a setting…" }), ...differ.map((k) => h("option", { value: k, text: k })));
      extra.hidden = !differ.length;
      heads = columns().map(makeHead);
      heads.filter((th) => th.dataset.column.startsWith("set:")).forEach((th) => th.append(h("button", { type: "button", class: "plain", "aria-label": `Remove ${th.textContent}`, text: "×", onclick: () => { state.settings = state.settings.filter((k) => `set:${k}` !== th.dataset.column); if (state.sort === th.dataset.column) state.sort = "changed"; rebuild(); } })));
      headRow.replaceChildren(h("th", {}, h("span", { class: "hidden", text: "Choose" })), ...heads);
      [...cards.values()].forEach((card) => put(card, false));
      arrange();
    }

    function row(card) {
      const box = h("input", { type: "checkbox", "aria-label": `Choose ${card.name}`, checked: chosen.has(card.name), onchange: () => { box.checked ? chosen.add(card.name) : chosen.delete(card.name); ready(); } });
      const metric = best(card), planned = card.title.rounds, run = isRun(card);
      if (!run) box.disabled = true;
      return h("tr", { "data-run": card.name }, h("td", {}, box), h("td", { class: "name" }, card.problem ? [card.name, h("div", { class: "small soft", text: card.problem })] : h("a", { href: address("run", [card.name]) }, breakable(card.name))),
        h("td", {}, h("span", { class: `status ${card.status.replaceAll(" ", "-")}`, text: card.status })), h("td", { class: "optional", text: card.title.task || "" }), h("td", { class: "under soft", text: (card.title.algorithm || []).join(" + ") }),
        h("td", { class: "n optional" }, run ? [number(card.done), planned ? h("span", { class: "soft", text: ` / ${planned}` }) : "", card.status === "running" && planned ? h("progress", { max: planned, value: card.done, "aria-label": "rounds done", style: "display:block;margin-left:auto" }) : ""] : ""),
        h("td", { class: "n under" }, metric ? [h("b", { text: number(metric[1]) }), " ", h("span", { class: "soft small", text: words(metric[0]) })] : ""),
        h("td", { class: "n optional" }, h("span", { class: "inline" }, card.loss.length > 1 ? spark(card.loss, 64, 20) : "", h("span", { class: "small", text: card.loss.length ? number(card.loss.at(-1), 3) : "" }))),
        h("td", { class: "n optional", text: card.seconds ? seconds(card.seconds) : "" }), h("td", { class: "n optional soft", text: ago(card.changed) }), state.settings.map((key) => h("td", { class: "under num" }, h("span", { class: "soft small phone", text: `${key.split(".").slice(-2).join(".")} ` }), setting(card, key))));
    }
    function put(card, fresh) {
      cards.set(card.name, card);
      const next = row(card), old = rows.get(card.name), focused = old && old.contains(document.activeElement) ? [...old.querySelectorAll("a, input")].indexOf(document.activeElement) : -1;
      if (fresh) next.classList.add("fresh");
      rows.set(card.name, next);
      if (old) old.replaceWith(next);
      if (focused >= 0) next.querySelectorAll("a, input")[focused]?.focus();
    }
    function arrange() {
      const value = columns().find(([id]) => id === state.sort)[2], words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = (c) => (!state.status || c.status === state.status) && words.every((w) => `${c.name} ${c.title.task || ""} ${c.title.data || ""} ${(c.title.algorithm || []).join(" ")}`.toLowerCase().includes(w));
      const order = [...cards.values()].filter(fits).sort((a, b) => { const rest = isRun(b) - isRun(a); if (rest) return rest; const x = value(a), y = value(b), s = x < y ? -1 : x > y ? 1 : a.name < b.name ? -1 : 1; return state.down ? -s : s; });
      if (order.some((c, k) => body.children[k] !== rows.get(c.name)) || body.children.length !== order.length) body.replaceChildren(...order.map((c) => rows.get(c.name)));
      heads.forEach((th) => (th.dataset.column === state.sort ? th.setAttribute("aria-sort", state.down ? "descending" : "ascending") : th.removeAttribute("aria-sort")));
      const running = order.filter((c) => c.status === "running").length;
      count.textContent = cards.size ? `${order.length} of ${cards.size} folders${running ? `, ${running} running` : ""}` : "There are no runs here yet. Start one with: fedlens run demo";
    }
    function ready() { compare.disabled = chosen.size < 2; compare.textContent = chosen.size < 2 ? "Compare (choose two or more)" : `Compare ${chosen.size} runs`; }

    rebuild();
    for (const name of [...chosen]) if (!cards.has(name)) chosen.delete(name);
    main.replaceChildren(
      h("header", { class: "masthead" }, h("div", {}, h("div", { class: "brand" }, home()), h("h1", { text: root })), Draw.themeButton()),
      h("div", { class: "bar-top" }, search, status, extra, compare), count,
      h("div", { class: "wide" }, h("table", { class: "runs" }, h("thead", {}, headRow), body)));
    document.title = `${root} · FedLens board`;
    ready();
    function take(changed, gone, fresh) {
      gone.forEach((name) => { cards.delete(name); rows.get(name)?.remove(); rows.delete(name); chosen.delete(name); });
      changed.forEach((card) => put(card, fresh));
      arrange();
      ready();
    }
    let changes = 0;
    async function again() {
      const before = changes, { runs: all } = await get("/api/runs"), there = new Set(all.map((c) => c.name));
      if (changes !== before) return again();  // the answer may be older than the change that came meanwhile
      if (current()) take(all.filter((c) => JSON.stringify(c) !== JSON.stringify(cards.get(c.name))), [...cards.keys()].filter((name) => !there.has(name)), false);
    }
    listen("/events", ({ cards: changed, gone }) => { changes += 1; take(changed, gone, true); }, () => again().catch(() => {}));
  }

  async function route() {
    const mine = ++turn, current = () => mine === turn;
    stream?.close();
    stream = null;
    Draw.forget();
    scrollTo(0, 0);
    try {
      const [, kind, ...names] = location.hash.split("/").map(decoded);
      if (kind === "run" && names.length) await show(names.slice(0, 1), false, current);
      else if (kind === "compare" && names.length) await show(names, true, current);
      else await list(current);
    } catch (error) { if (current()) complain(error.message); }
  }
  addEventListener("hashchange", () => { if (location.hash === "" || location.hash.startsWith("#/")) route(); });
  route();
}
