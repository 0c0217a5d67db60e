"use strict";
/* The board: a list of runs, one run, or several, by the part of the address behind #. Data come from /api, changes from /events. */
{
  const { h, number, seconds, words, spark } = Draw;
  const main = document.getElementById("main");
  let stream = null;  // the events of the page that is shown
  const chosen = new Set();

  const address = (kind, names) => `#/${kind}/${names.map(encodeURIComponent).join("/")}`;
  const query = (key, names) => names.map((n) => `${key}=${encodeURIComponent(n)}`).join("&");
  async function get(url) {
    const answer = await fetch(url), body = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(body.error || `The board answered ${answer.status}.`);
    return body;
  }
  const home = () => h("a", { href: "#/", text: "FedLens board" });
  function complain(text) { main.replaceChildren(h("header", {}, h("div", { class: "masthead" }, h("div", {}, h("div", { class: "brand" }, home()), h("h1", { text: "Nothing to show" })))), h("ul", { class: "problems" }, h("li", { text }))); }

  /* One connection a page. Whenever it opens everything is fetched again: what changed before that would be missed. */
  function listen(url, changed, again) {
    stream = new EventSource(url);
    stream.addEventListener("change", (e) => changed(JSON.parse(e.data)));
    stream.addEventListener("open", again);
  }

  // ---- one run, or several
  async function show(names, comparing) {
    const fetchAll = async () => (await get(`/api/run?${query("name", names)}`)).views;
    const views = await fetchAll();
    const page = comparing ? View.comparison(views, home(), names.length > 1 ? `${names.length} runs side by side` : names[0]) : View.run(views[0], home());
    const link = comparing ? "" : h("p", { class: "small", style: "margin-top:48px" }, h("a", { href: `/report?${query("run", names)}`, text: "Save this page as one file" }));
    main.replaceChildren(page.node, link);
    document.title = `${comparing ? "Comparison" : names[0]} · FedLens`;
    let busy = false, more = false;
    async function refresh() {  // news that arrive while some are being fetched are fetched once, after them
      if (busy) { more = true; return; }
      busy = true;
      try { const next = await fetchAll(); page.update(comparing ? next : next[0]); } catch { /* the folder may be in the middle of a change */ }
      busy = false;
      if (more) { more = false; refresh(); }
    }
    listen(`/events?${query("run", names)}`, refresh, refresh);
  }

  // ---- the list
  const COLUMNS = [
    ["name", "Run", (c) => c.name], ["status", "Status", (c) => c.status], ["task", "Task", (c) => c.title.task || ""], ["algorithm", "Algorithm", (c) => (c.title.algorithm || []).join(" + ")],
    ["done", "Rounds", (c) => c.done], ["metric", "Result", (c) => { const m = best(c); return m ? m[1] : -Infinity; }], ["loss", "Loss", (c) => c.loss.at(-1) ?? Infinity], ["seconds", "Time", (c) => c.seconds ?? 0], ["changed", "Changed", (c) => c.changed],
  ];
  const best = (card) => { const name = View.chief(Object.keys(card.metrics))[0]; return name ? [name, card.metrics[name]] : null; };
  const isRun = (card) => !["empty", "not a run", "broken"].includes(card.status);  // what is no run comes last, however the list is sorted
  const ago = (t) => { const s = Date.now() / 1000 - t; return s < 60 ? "now" : s < 3600 ? `${Math.floor(s / 60)} min ago` : s < 86400 ? `${Math.floor(s / 3600)} h ago` : new Date(t * 1000).toLocaleDateString("en-CA"); };
  const state = { text: "", status: "", sort: "changed", down: true };

  async function list() {
    const { root, runs } = await get("/api/runs");
    const cards = new Map(runs.map((c) => [c.name, c])), rows = new Map(), body = h("tbody"), count = h("p", { class: "soft small", role: "status" });
    const compare = h("button", { type: "button", onclick: () => { location.hash = address("compare", [...chosen]); } });
    const search = h("input", { type: "search", placeholder: "Filter by name, task or algorithm", "aria-label": "Filter runs", value: state.text, oninput: () => { state.text = search.value; arrange(); } });
    const status = h("select", { "aria-label": "Status", onchange: () => { state.status = status.value; arrange(); } }, ["", "running", "finished", "stopped", "empty", "not a run", "broken"].map((v) => h("option", { value: v, text: v || "any status", selected: v === state.status })));
    const heads = COLUMNS.map(([id, text]) => h("th", { scope: "col", "data-column": id, class: ["done", "metric", "loss", "seconds", "changed"].includes(id) ? "n" : null }, h("button", { type: "button", text, onclick: () => { state.down = state.sort === id ? !state.down : !["name", "status", "task", "algorithm"].includes(id); state.sort = id; arrange(); } })));

    function row(card) {
      const box = h("input", { type: "checkbox", "aria-label": `Choose ${card.name}`, checked: chosen.has(card.name), onchange: () => { box.checked ? chosen.add(card.name) : chosen.delete(card.name); ready(); } });
      const metric = best(card), planned = card.title.rounds, run = isRun(card);
      if (!run) box.disabled = true;
      return h("tr", { "data-run": card.name }, h("td", {}, box), h("td", { class: "name" }, card.problem ? [card.name, h("div", { class: "small soft", text: card.problem })] : h("a", { href: address("run", [card.name]), text: card.name })),
        h("td", {}, h("span", { class: `status ${card.status.replaceAll(" ", "-")}`, text: card.status })), h("td", { class: "optional", text: card.title.task || "" }), h("td", { class: "under soft", text: (card.title.algorithm || []).join(" + ") }),
        h("td", { class: "n optional" }, run ? [number(card.done), planned ? h("span", { class: "soft", text: ` / ${planned}` }) : "", card.status === "running" && planned ? h("progress", { max: planned, value: card.done, "aria-label": "rounds done", style: "display:block;margin-left:auto" }) : ""] : ""),
        h("td", { class: "n under" }, metric ? [h("b", { text: number(metric[1]) }), " ", h("span", { class: "soft small", text: words(metric[0]) })] : ""),
        h("td", { class: "n optional" }, h("span", { class: "inline" }, card.loss.length > 1 ? spark(card.loss, 64, 20) : "", h("span", { class: "small", text: card.loss.length ? number(card.loss.at(-1), 3) : "" }))),
        h("td", { class: "n optional", text: card.seconds ? seconds(card.seconds) : "" }), h("td", { class: "n optional soft", text: ago(card.changed) }));
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
      const value = COLUMNS.find(([id]) => id === state.sort)[2], words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = (c) => (!state.status || c.status === state.status) && words.every((w) => `${c.name} ${c.title.task || ""} ${c.title.data || ""} ${(c.title.algorithm || []).join(" ")}`.toLowerCase().includes(w));
      const order = [...cards.values()].filter(fits).sort((a, b) => { const rest = isRun(b) - isRun(a); if (rest) return rest; const x = value(a), y = value(b), s = x < y ? -1 : x > y ? 1 : a.name < b.name ? -1 : 1; return state.down ? -s : s; });
      if (order.some((c, k) => body.children[k] !== rows.get(c.name)) || body.children.length !== order.length) body.replaceChildren(...order.map((c) => rows.get(c.name)));
      heads.forEach((th) => (th.dataset.column === state.sort ? th.setAttribute("aria-sort", state.down ? "descending" : "ascending") : th.removeAttribute("aria-sort")));
      const running = order.filter((c) => c.status === "running").length;
      count.textContent = cards.size ? `${order.length} of ${cards.size} folders${running ? `, ${running} running` : ""}` : "There are no runs here yet. Start one with: fedlens run demo";
    }
    function ready() { compare.disabled = chosen.size < 2; compare.textContent = chosen.size < 2 ? "Compare (choose two or more)" : `Compare ${chosen.size} runs`; }

    runs.forEach((c) => put(c, false));
    for (const name of [...chosen]) if (!cards.has(name)) chosen.delete(name);
    main.replaceChildren(
      h("header", { class: "masthead" }, h("div", {}, h("div", { class: "brand" }, home()), h("h1", { text: root })), Draw.themeButton()),
      h("div", { class: "bar-top" }, search, status, compare), count,
      h("div", { class: "wide" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, h("th", {}, h("span", { class: "hidden", text: "Choose" })), heads)), body)));
    document.title = `${root} · FedLens board`;
    arrange();
    ready();
    listen("/events", ({ cards: changed, gone }) => {
      gone.forEach((name) => { cards.delete(name); rows.get(name)?.remove(); rows.delete(name); chosen.delete(name); });
      changed.forEach((card) => put(card, true));
      arrange();
      ready();
    }, () => get("/api/runs").then(({ runs: all }) => { all.filter((c) => JSON.stringify(c) !== JSON.stringify(cards.get(c.name))).forEach((c) => put(c, false)); arrange(); }).catch(() => {}));
  }

  async function route() {
    stream?.close();
    Draw.forget();
    const [, kind, ...names] = location.hash.split("/").map(decodeURIComponent);
    scrollTo(0, 0);
    try {
      if (kind === "run" && names.length) await show(names.slice(0, 1), false);
      else if (kind === "compare" && names.length) await show(names, true);
      else await list();
    } catch (error) { complain(error.message); }
  }
  addEventListener("hashchange", () => { if (location.hash === "" || location.hash.startsWith("#/")) route(); });
  route();
}
