"use strict";
/* Small drawing kit: elements, numbers, colour scales, curves, matrices. No dependencies; all text goes in as text, never as HTML. */
const Draw = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function add(node, props, children) {
    for (const [key, value] of Object.entries(props || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (key === "text") node.textContent = value;
      else if (key === "style") node.style.cssText = value;
      else node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
    return node;
  }
  const h = (tag, props, ...children) => add(document.createElement(tag), props, children);
  const s = (tag, props, ...children) => add(document.createElementNS(SVG, tag), props, children);

  // ---- numbers and words
  function number(x, digits = 4) {
    if (x === null || x === undefined || !Number.isFinite(+x)) return "–";
    x = +x;
    const size = Math.abs(x);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2).replace("e-", "e−").replace("e+", "e");
    if (Number.isInteger(x) || size >= 1e4) return Math.round(x).toLocaleString("en").replace("-", "−");
    const places = Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(size || 1))));
    return x.toFixed(Math.min(places, size < 1 ? digits : places)).replace("-", "−");
  }
  function bytes(x) {
    if (!Number.isFinite(x)) return "–";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let k = 0;
    while (Math.abs(x) >= 1000 && k < 4) { x /= 1000; k++; }
    return `${k ? x.toPrecision(3) : Math.round(x)} ${units[k]}`;
  }
  function seconds(x) {
    if (!Number.isFinite(x)) return "–";
    if (x < 1) return x ? `${Math.round(x * 1000)} ms` : "0 s";
    if (x < 90) return `${x.toPrecision(3)} s`;
    const m = Math.round(x / 60);
    return m < 90 ? `${Math.floor(x / 60)} min ${Math.round(x % 60)} s` : `${Math.floor(m / 60)} h ${m % 60} min`;
  }
  const WORSE = ["loss", "error", "lpips", "niqe", "fid", "kid", "mse", "mae", "rmse", "nll", "distance", "seconds", "bytes", "memory", "spread", "epe"];
  const higherIsBetter = (name) => !name.toLowerCase().split(/[_-]/).some((part) => WORSE.includes(part));
  const CAPITALS = { psnr: "PSNR", ssim: "SSIM", lpips: "LPIPS", niqe: "NIQE", map: "mAP", ap: "AP", pck: "PCK", fid: "FID", kid: "KID", oks: "OKS", mse: "MSE", mae: "MAE", iou: "IoU", vmaf: "VMAF" };
  function words(name) {  // client_accuracy_worst -> accuracy, worst client
    const m = /^client_(.*?)(_spread|_worst)?$/.exec(name);
    if (m) return words(m[1]) + (m[2] === "_worst" ? ", worst client" : m[2] === "_spread" ? ", spread over clients" : ", mean of clients");
    return name.split("_").map((w) => CAPITALS[w.toLowerCase()] || w).join(" ");
  }
  const unit = (name) => (/(^|_)psnr/.test(name) && !name.endsWith("_spread") ? "dB" : "");

  // ---- colour: one-hue ramp for shares and counts, viridis for maps, inferno for residuals, blue-white-red for signed values
  const STOPS = {
    viridis: ["440154", "46327e", "365c8d", "277f8e", "1fa187", "4ac16d", "a0da39", "fde725"],
    inferno: ["000004", "280b53", "65156e", "9f2a63", "d44842", "f57d15", "fac127", "fcffa4"],
    signed: ["053061", "2166ac", "4393c3", "92c5de", "f7f7f7", "f4a582", "d6604d", "b2182b", "67001f"],
    light: ["f0f4f8", "c9deee", "94c0de", "5a9bc8", "2a75ad", "0e4f86", "082f56"],
    dark: ["22272e", "1f3f5c", "23608d", "3584ba", "5ea8dc", "9bcdf2", "def0fd"],
  };
  const tables = {};
  function scale(name) {  // 256 RGB triples
    if (tables[name]) return tables[name];
    const stops = STOPS[name].map((c) => [0, 2, 4].map((k) => parseInt(c.slice(k, k + 2), 16)));
    const out = new Uint8Array(768);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (stops.length - 1), k = Math.min(Math.floor(at), stops.length - 2), f = at - k;
      for (let c = 0; c < 3; c++) out[3 * i + c] = Math.round(stops[k][c] * (1 - f) + stops[k + 1][c] * f);
    }
    return (tables[name] = out);
  }
  function colour(name, t) {
    const i = 3 * Math.round(Math.max(0, Math.min(1, t)) * 255), table = scale(name);
    return `rgb(${table[i]},${table[i + 1]},${table[i + 2]})`;
  }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isDark = () => {
    const theme = document.documentElement.dataset.theme;
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  function colourBar(name, low, high) {
    const canvas = h("canvas", { width: 256, height: 1, "aria-hidden": "true" }), ctx = canvas.getContext("2d");
    for (let i = 0; i < 256; i++) { ctx.fillStyle = colour(name, i / 255); ctx.fillRect(i, 0, 1, 1); }
    return h("span", { class: "bar" }, h("span", { text: low }), canvas, h("span", { text: high }));
  }

  // ---- theme: what is painted on a canvas has to be painted again
  const painters = new Set(), smoothers = new Set();
  const onTheme = (paint) => painters.add(paint), forget = () => { painters.clear(); smoothers.clear(); };
  const repaint = () => requestAnimationFrame(() => painters.forEach((paint) => paint()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  function themeButton() {
    const keep = (v) => { try { v ? localStorage.setItem("theme", v) : localStorage.removeItem("theme"); } catch { /* file:// may forbid it */ } };
    try { const v = localStorage.getItem("theme"); if (v) document.documentElement.dataset.theme = v; } catch { /* same */ }
    const label = () => (isDark() ? "Light" : "Dark");
    const button = h("button", { type: "button", class: "theme", text: label(), "aria-label": "Switch between light and dark", onclick: () => {
      const theme = isDark() ? "light" : "dark";
      document.documentElement.dataset.theme = theme;
      keep(theme);
      button.textContent = label();
      repaint();
    } });
    return button;
  }

  // ---- sizes: draw again when the width changes
  function onWidth(node, draw) {
    let last = 0;
    new ResizeObserver(() => {
      const width = Math.round(node.clientWidth);
      if (width && Math.abs(width - last) > 1) { last = width; requestAnimationFrame(draw); }
    }).observe(node);
  }

  // ---- axes
  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((x) => x >= raw * 0.999) || power;
    const out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
    return out;
  }
  const DASH = ["", "7 3", "2 3", "9 3 2 3"];
  const look = (k) => ({ stroke: `var(--c${k % 8})`, "stroke-dasharray": DASH[Math.floor(k / 8) % 4] || null });

  /* Smoothing of all line charts: an exponential mean that begins at the first value. The curve itself stays behind it, faint. */
  let smoothing = 0;
  function smoothed(y) {
    let level = null;
    return y.map((v) => { if (v === null) return null; level = level === null ? v : smoothing * level + (1 - smoothing) * v; return level; });
  }
  function smoothingTool() {
    const said = h("span", { class: "num", text: number(smoothing) });
    const slide = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: smoothing, oninput: () => { smoothing = +slide.value; said.textContent = number(smoothing); smoothers.forEach((draw) => draw()); } });
    return h("div", { class: "tools smoothing" }, h("label", {}, "Smoothing", slide, said));
  }
  let clips = 0;  // of names for clip paths

  /* A line chart. data: {title, unit, format, series: [{name, x, y, k, area}], log: may it be logarithmic, zero: start at 0, from: x of the first round}.
     Pointer or arrow keys move a cross-hair; the key below says the values there. */
  function lines(first) {
    let data = first, logarithmic = null, at = null, geometry = null;
    const title = h("h3"), logButton = h("button", { type: "button", class: "plain", text: "log", "aria-pressed": "false", onclick: () => {
      logarithmic = !isLog();
      draw();
    } });
    const svg = s("svg", { tabindex: 0, role: "img" }), key = h("div", { class: "key" }), said = h("span", { class: "hidden", "aria-live": "polite" });
    const node = h("section", { class: "chart" }, h("header", {}, title, logButton), svg, key, said), clipName = `plot-${clips++}`;
    const format = (v) => (data.format || number)(v);
    const series = () => data.series.filter((one) => one.y.some((v) => v !== null));
    const ratio = () => { const ys = series().flatMap((one) => one.y).filter((v) => v !== null); return Math.max(...ys) / Math.min(...ys); };
    const isLog = () => Boolean(data.log) && positive() && (logarithmic ?? ratio() > 300);  // unless the reader chose, wide ranges are logarithmic
    const positive = () => series().length > 0 && series().every((one) => one.y.every((v) => v === null || v > 0));

    function draw() {
      const width = node.clientWidth, height = Math.round(Math.max(170, Math.min(250, width * 0.48)));
      if (!width) return;
      const list = series(), log = isLog();
      logButton.setAttribute("aria-pressed", log);
      title.textContent = data.title;
      logButton.style.display = data.log && positive() ? "" : "none";
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("height", height);
      svg.replaceChildren();
      geometry = null;
      svg.setAttribute("aria-label", `${data.title}: ${list.map((one) => `${one.name} ends at ${format(one.y.filter((v) => v !== null).at(-1))}`).join("; ") || "no values yet"}. Arrow keys read values.`);
      if (!list.length) { svg.append(s("text", { x: 0, y: 24, fill: "var(--faint)", "font-size": 13 }, "No values yet")); legend(); return; }
      const xs = list.flatMap((one) => one.x), ys = list.flatMap((one) => one.y).filter((v) => v !== null);
      let x0 = Math.min(...xs.slice(0, 1), ...list.map((one) => one.x[0])), x1 = Math.max(...list.map((one) => one.x.at(-1)), data.until || 0);
      if (x1 === x0) { x0 -= 0.5; x1 += 0.5; }
      let y0 = ys.reduce((a, b) => Math.min(a, b)), y1 = ys.reduce((a, b) => Math.max(a, b));
      if (!log) {  // room for bands, but not so much that the curves become flat; what is beyond is cut off
        const spread = (sign) => list.flatMap((one) => (one.band ? one.y.map((v, i) => v + sign * one.band[i]) : [])), most = 0.5 * (y1 - y0);
        [y0, y1] = [Math.max(y0 - most, Math.min(y0, ...spread(-1))), Math.min(y1 + most, Math.max(y1, ...spread(1)))];
      }
      const f = log ? Math.log10 : (v) => v;
      if (log) { y0 = f(y0); y1 = f(y1); }
      if (data.zero && !log) y0 = Math.min(0, y0);
      const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
      y1 += pad;
      if (!(data.zero && y0 === 0)) y0 -= pad;
      const marks = log ? decades(y0, y1) : ticks(y0, y1, 4).map((v) => [v, v]);
      const labels = marks.map(([, v]) => format(v).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "")), left = Math.max(30, 9 + 6.3 * Math.max(...labels.map((l) => l.length)));
      const X = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - 10), Y = (v) => 10 + (1 - (f(v) - y0) / (y1 - y0)) * (height - 34);
      const axis = s("g", { class: "axis" });
      marks.forEach(([p, v], k) => {
        const y = 10 + (1 - (p - y0) / (y1 - y0)) * (height - 34);
        axis.append(s("line", { x1: left, x2: width - 10, y1: y, y2: y }), s("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, labels[k]));
      });
      const shown = ticks(x0, x1, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger);
      shown.forEach((v) => axis.append(s("text", { x: X(v), y: height - 6, "text-anchor": "middle" }, number(v))));
      const plot = s("g", { "clip-path": `url(#${clipName})` });
      svg.append(s("clipPath", { id: clipName }, s("rect", { x: left - 4, y: 2, width: Math.max(0, width - left - 2), height: height - 22 })), axis, plot);
      for (const one of list) {
        let start = null, last = null;
        const along = (ys) => {
          let path = "", pen = "M";
          one.x.forEach((x, i) => {
            if (ys[i] === null) return;  // not measured in that round: the line goes on to the next that was
            path += `${pen}${X(x).toFixed(1)} ${Y(ys[i]).toFixed(1)}`;
            pen = "L"; start = start ?? X(x); last = X(x);
          });
          return path;
        };
        const path = along(one.y);
        if (one.area && !log) plot.append(s("path", { class: "area", d: `${path}L${last} ${Y(Math.max(0, y0))}L${start} ${Y(Math.max(0, y0))}Z`, fill: `var(--c${one.k % 8})` }));
        if (one.band && !log && one.x.length > 1) {
          const edge = (sign) => one.x.map((x, i) => `${X(x).toFixed(1)} ${Y(one.y[i] + sign * one.band[i]).toFixed(1)}`);
          plot.append(s("path", { class: "area", d: `M${[...edge(1), ...edge(-1).reverse()].join("L")}Z`, fill: `var(--c${one.k % 8})` }));
        }
        plot.append(s("path", { class: smoothing ? "series raw" : "series", d: path, ...look(one.k) }));
        if (smoothing) plot.append(s("path", { class: "series", d: along(smoothed(one.y)), ...look(one.k) }));
        if (!smoothing && one.y.filter((v) => v !== null).length <= 30) one.x.forEach((x, i) => one.y[i] !== null && plot.append(s("circle", { class: "dot", cx: X(x), cy: Y(one.y[i]), r: 3, fill: `var(--c${one.k % 8})` })));
      }
      geometry = { X, Y, x0, x1, left, width, height, xs: [...new Set(xs)].sort((a, b) => a - b) };
      legend();
    }

    function legend() {
      svg.querySelector(".cursor")?.remove();
      const cursor = s("g", { class: "cursor" });
      const list = series(), many = list.length > 1 || list[0]?.name;
      key.replaceChildren();
      if (at !== null && geometry) {
        cursor.append(s("line", { class: "cross", x1: geometry.X(at), x2: geometry.X(at), y1: 6, y2: geometry.height - 22 }));
        key.append(h("span", {}, `${data.xname || "round"} `, h("b", { text: number(at) })));
      }
      for (const one of list) {
        const i = at === null ? one.y.length - 1 : nearest(one, at), value = at === null ? one.y.filter((v) => v !== null).at(-1) : one.y[i];
        if (at !== null && geometry && value !== null && value !== undefined) cursor.append(s("circle", { class: "dot", cx: geometry.X(one.x[i]), cy: geometry.Y(value), r: 4, fill: `var(--c${one.k % 8})` }));
        const swatch = many && s("svg", { "aria-hidden": "true" }, s("line", { x1: 0, x2: 20, y1: 4, y2: 4, "stroke-width": 2.5, ...look(one.k) }));
        key.append(h("span", {}, swatch, one.name ? `${one.name} ` : "", h("b", { text: `${format(value)}${data.unit ? " " + data.unit : ""}` })));
      }
      svg.append(cursor);
      if (at !== null) said.textContent = key.textContent;
    }
    const nearest = (one, x) => one.x.reduce((best, v, i) => (Math.abs(v - x) < Math.abs(one.x[best] - x) ? i : best), 0);

    svg.addEventListener("pointermove", (e) => {
      if (!geometry) return;
      const x = geometry.x0 + ((e.clientX - svg.getBoundingClientRect().left - geometry.left) / (geometry.width - geometry.left - 10)) * (geometry.x1 - geometry.x0);
      at = geometry.xs.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
      legend();
    });
    const away = () => { at = null; legend(); };
    svg.addEventListener("pointerleave", away);
    svg.addEventListener("blur", away);
    svg.addEventListener("keydown", (e) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[e.key];
      if (step === undefined || !geometry) return;
      e.preventDefault();
      const xs = geometry.xs, now = at === null ? (step > 0 ? -1 : xs.length) : xs.indexOf(at);
      at = xs[Math.max(0, Math.min(xs.length - 1, now + step))];
      legend();
    });
    onWidth(node, draw);
    smoothers.add(draw);
    return { node, update(next) { data = next; draw(); } };
  }
  function decades(low, high) {
    const out = [];
    for (let p = Math.floor(low); p <= Math.ceil(high); p++) for (const m of high - low > 2.5 ? [1] : high - low > 0.9 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8]) {
      const at = p + Math.log10(m);
      if (at >= low && at <= high) out.push([at, m * 10 ** p]);
    }
    return out;
  }

  function spark(values, width = 120, height = 26) {
    const ys = values.filter((v) => v !== null && Number.isFinite(v));
    const svg = s("svg", { class: "spark", width, height, "aria-hidden": "true" });
    if (ys.length < 2) return svg;
    const low = Math.min(...ys), high = Math.max(...ys);
    const at = (v, i) => [(i / (ys.length - 1)) * (width - 4) + 2, 2 + (1 - (v - low) / (high - low || 1)) * (height - 4)];
    svg.append(s("path", { d: ys.map((v, i) => `${i ? "L" : "M"}${at(v, i).map((c) => c.toFixed(1)).join(" ")}`).join("") }));
    const [cx, cy] = at(ys.at(-1), ys.length - 1);
    svg.append(s("circle", { cx, cy, r: 2.2 }));
    return svg;
  }

  /* A matrix on a canvas. data: {rows, columns (labels), cell(r, c) -> {t: 0..1, lost, heard} or null, say(r, c) -> text, dots, label, rowName, columnName}.
     Pointer or arrow keys pick a cell; the line below says what it is. */
  function matrix(first) {
    let data = first, picked = null, box = null;
    const canvas = h("canvas", { tabindex: 0, role: "img" }), scroll = h("div", { class: "scroll" }, canvas);
    const readout = h("div", { class: "readout", "aria-live": "polite" });
    const node = h("div", { class: "matrix" }, scroll, readout);

    function draw() {
      const width = node.clientWidth;
      if (!width) return;
      const R = data.rows.length, C = data.columns.length;
      const longest = (labels) => Math.max(2, ...labels.map((l) => String(l).length));
      const left = Math.min(width * 0.3, 14 + 6.2 * longest(data.rows)), upright = data.square, bottom = upright ? Math.min(110, 12 + 6.2 * longest(data.columns)) : 22;
      const cw = Math.max(data.dots ? 5 : 2, Math.min(data.square ? 52 : data.dots ? 34 : 26, (width - left - 4) / Math.max(1, C)));
      const ch = Math.max(R > 150 ? 4 : 7, data.square ? Math.max(9, cw * 0.62) : Math.min(data.dots ? 24 : 17, data.dots ? Math.max(cw, 13) : 520 / Math.max(1, R)));
      const w = Math.ceil(left + cw * C + 4), hgt = Math.ceil(ch * R + bottom), ratio = Math.min(window.devicePixelRatio || 1, 2);
      canvas.width = w * ratio; canvas.height = hgt * ratio;
      canvas.style.width = `${w}px`; canvas.style.height = `${hgt}px`;
      canvas.setAttribute("aria-label", `${data.label}. Arrow keys read the cells.`);
      const ctx = canvas.getContext("2d"), ramp = isDark() ? "dark" : "light", faint = css("--faint"), bad = css("--bad"), line = css("--line"), accent = css("--accent");
      ctx.scale(ratio, ratio);
      ctx.font = `11px ${css("--sans")}`;
      ctx.fillStyle = faint; ctx.textBaseline = "middle"; ctx.textAlign = "right";
      const every = Math.ceil(13 / ch);
      data.rows.forEach((label, r) => { if (r % every === 0) ctx.fillText(clip(String(label), left - 8, ctx), left - 8, (r + 0.5) * ch); });
      ctx.textAlign = "center";
      const wide = 8 + 6.5 * Math.max(...data.columns.map((l) => String(l).length)), jump = data.square ? 1 : nice(Math.ceil(wide / cw));
      const each = upright ? Math.ceil(12 / cw) : jump;
      data.columns.forEach((label, c) => {
        if (c % each) return;
        const x = Math.max(left + 4, left + (c + 0.5) * cw);
        if (!upright) { ctx.fillText(label, x, hgt - 9); return; }
        ctx.save(); ctx.translate(x, hgt - bottom + 6); ctx.rotate(-Math.PI / 2); ctx.textAlign = "right"; ctx.fillText(clip(String(label), bottom - 8, ctx), 0, 0); ctx.restore();
      });
      if (data.dots) {
        ctx.fillStyle = line;
        for (let r = 0; r < R; r++) ctx.fillRect(left, (r + 0.5) * ch - 0.25, cw * C, 0.5);
      }
      const gap = cw > 6 && ch > 6 ? 1 : cw > 3.5 ? 0.5 : 0;
      for (let r = 0; r < R; r++) for (let c = 0; c < C; c++) {
        const cell = data.cell(r, c), x = left + c * cw, y = r * ch;
        if (!cell) continue;
        if (cell.lost) {
          ctx.strokeStyle = bad; ctx.lineWidth = 1.5;
          const q = Math.max(1.2, Math.min(cw, ch) * 0.28), mx = x + cw / 2, my = y + ch / 2;
          ctx.beginPath(); ctx.moveTo(mx - q, my - q); ctx.lineTo(mx + q, my + q); ctx.moveTo(mx - q, my + q); ctx.lineTo(mx + q, my - q); ctx.stroke();
        } else if (data.dots) {
          if (cell.t <= 0) continue;
          ctx.fillStyle = accent;
          ctx.beginPath(); ctx.arc(x + cw / 2, y + ch / 2, Math.max(0.8, (Math.min(cw, ch) / 2 - 0.5) * Math.sqrt(cell.t)), 0, 7); ctx.fill();
        } else if (cell.t === null) {
          ctx.fillStyle = line; ctx.fillRect(x, y, cw - gap, ch - gap);
        } else {
          ctx.fillStyle = colour(ramp, cell.t); ctx.fillRect(x, y, cw - gap, ch - gap);
        }
      }
      box = { left, cw, ch, R, C };
      if (picked) { ctx.strokeStyle = css("--ink"); ctx.lineWidth = 1.5; ctx.strokeRect(left + picked[1] * cw - 0.5, picked[0] * ch - 0.5, cw, ch); }
      readout.textContent = picked ? data.say(...picked) : data.rest || "";
    }
    function nice(n) { return [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000].find((v) => v >= n) || n; }
    function clip(text, room, ctx) {
      while (text.length > 1 && ctx.measureText(text).width > room) text = text.slice(0, -2) + "…";
      return text;
    }
    function pick(next) {
      if (String(next) === String(picked)) return;
      picked = next;
      draw();
    }
    canvas.addEventListener("pointermove", (e) => {
      if (!box) return;
      const at = canvas.getBoundingClientRect(), c = Math.floor((e.clientX - at.left - box.left) / box.cw), r = Math.floor((e.clientY - at.top) / box.ch);
      pick(r >= 0 && r < box.R && c >= 0 && c < box.C ? [r, c] : null);
    });
    canvas.addEventListener("pointerleave", () => pick(null));
    canvas.addEventListener("blur", () => pick(null));
    canvas.addEventListener("keydown", (e) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[e.key];
      if (!move || !box) return;
      e.preventDefault();
      const [r, c] = picked || [-move[0], -move[1]];
      pick([Math.max(0, Math.min(box.R - 1, r + move[0])), Math.max(0, Math.min(box.C - 1, c + move[1]))]);
    });
    onWidth(node, draw);
    onTheme(draw);
    return { node, update(next) { data = next; if (picked && (picked[0] >= data.rows.length || picked[1] >= data.columns.length)) picked = null; draw(); } };
  }

  /* Buttons of which one is pressed. */
  function choice(names, current, choose, label) {
    const group = h("span", { class: "group", role: "group", "aria-label": label });
    names.forEach(([id, text]) => group.append(h("button", { type: "button", text, "data-id": id, "aria-pressed": String(id === current), onclick: () => {
      group.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.id === id)));
      choose(id);
    } })));
    return group;
  }

  return { h, s, number, bytes, seconds, words, unit, higherIsBetter, scale, colour, colourBar, isDark, onTheme, forget, onWidth, themeButton, smoothingTool, lines, spark, matrix, choice };
})();
